"""The kinds of product, one file each."""
