"""Inputs of checkpointed layers move to the host after forward, and are back before backward needs them.

::

    engine.py ─┬► order.py    the order of backward, and how far ahead loads are issued
               ├► arena.py    host memory
               ├► report.py   what was moved, held and waited for
               └► link.py     copies and events of a device
"""
