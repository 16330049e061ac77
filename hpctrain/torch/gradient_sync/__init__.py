"""`ht.torch.sync`: the gradients of a loop of the user's own, summed over the ranks."""
