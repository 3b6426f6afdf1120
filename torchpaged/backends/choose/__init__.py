"""Which backend runs an attention, and why: names.py knows the backends, order.py in which order they are
tried, select.py chooses, route.py makes one backend of two, for_call.py chooses for a single call, by its
kind.py, and traced.py for one that is compiled."""
