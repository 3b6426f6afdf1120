"""Which backend runs an attention, and why: names.py knows the backends, select.py in which order they are
tried, and chooses, route.py makes one backend of two, for_call.py chooses for a single call, by its
kind.py, and traced.py for one that is compiled."""
