"""What Apex knew about recurrent functions. They are patched like all others here, in `torch._VF`."""

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


def has_old_rnns() -> bool:
    """Tell whether torch has the recurrent backends of before 1.0."""
    return False
