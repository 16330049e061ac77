"""Built-in recipes: a TOML file each, run by its name from anywhere."""
