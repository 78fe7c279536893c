"""The adaptation methods, one file or folder for each paper; `acclimate.list_methods()` lists them."""
