"""Values of the constants that elementwise ops have, by name."""

CONSTANTS = {
    "limit": 7.0,
    "alpha": 1.702,
    "glu_linear_offset": 1.0,
    "beta1": 4.0,
    "beta2": 25.0,
    "scale": 0.3,
    "tanh_clamp_scale": 2.5,
}
