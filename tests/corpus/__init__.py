"""One corpus of attention: modules with their truth as data, and the properties that hold for all of them."""
