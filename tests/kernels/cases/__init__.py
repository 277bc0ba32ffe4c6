"""Cases: the calls on which launches are compared with their definitions. Nothing that runs a model imports them."""
