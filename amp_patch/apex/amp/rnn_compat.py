"""`has_old_rnns`, the only name that scripts import from Apex's `apex.amp.rnn_compat`."""


def has_old_rnns() -> bool:
    """Return whether torch has the recurrent backends from before version 1.0: False."""
    return False
