"""One file, one paper. `acclimate.list_methods()` lists them."""
