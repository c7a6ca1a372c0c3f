"""Copies between cache tensors and host pages; the only folder that may touch `torch.cuda`. See README.md."""
