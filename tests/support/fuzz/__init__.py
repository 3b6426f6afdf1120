"""Random attention configurations and batches: ``draw`` makes them, ``aims`` draws for one kernel, ``case``
runs one against the reference."""
