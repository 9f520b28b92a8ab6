"""The name that scripts import from Apex's `apex.amp.rnn_compat`."""


def has_old_rnns() -> bool:
    """Return whether torch has the recurrent backends of before 1.0."""
    return False
