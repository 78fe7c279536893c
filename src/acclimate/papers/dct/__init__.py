"""The DCT paper (Tang et al., ACM MM 2024): its numbers and its experiments."""
