"""The worker side: moves pages between one rank's cache tensors and the node's store. See README.md."""
