"""What surrounds torch.compile: compiled code kept between processes, and code objects of their own."""
