"""Where labels and logits meet: runs, their scores, and the tables made of them."""
