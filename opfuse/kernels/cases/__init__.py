"""The calls that a launch is compared with its definition on. The library never imports them."""
