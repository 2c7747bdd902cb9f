"""What checkpointed layers keep leaves the device after forward, and is back before backward needs it.

::

    engine.py ─┬► order.py    the order of backward, and how far ahead loads are issued
               ├► arena.py    host memory
               ├► report.py   what was moved, held and waited for
               └► link.py     copies and events of a device
"""
