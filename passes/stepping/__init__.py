"""What the step returns: the argmax, the best tokens, picked logits, trees."""
