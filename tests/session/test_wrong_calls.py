"""Wrong calls of the public functions: each message, held against its text. One sentence says what was wrong, and then
comes the remedy.
"""

import pytest
import torch
from torch import nn

import amp_patch as amp
from amp_patch import apex, insight
from amp_patch.apex import amp as apex_amp
from amp_patch.integrations.trackers import Tracker

T, V, P, S = amp.ArgumentTypeError, amp.ArgumentValueError, amp.PolicyError, amp.SessionError


class Given:
    """What calls are made with: a model and an optimizer, initialized at O1 if a call needs that."""

    def __init__(self):
        self.model = nn.Linear(3, 3)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loss = torch.ones((), requires_grad=True)

    def init(self, *args, **kwargs):
        return amp.initialize(*(args or (self.model, self.opt)), verbosity=kwargs.pop("verbosity", 0), **kwargs)


# name: (whether a session is in force, or None if amp is disabled, the call, the class of the error, its text)
CALLS = {
    "no-model": (
        False,
        lambda g: g.init(None, g.opt),
        T,
        "models must be a torch.nn.Module or a sequence of them, not NoneType: pass the model itself, or "
        "amp.session(opt_level=...) for code without one",
    ),
    "class": (
        False,
        lambda g: g.init(nn.Linear),
        T,
        "models must be a torch.nn.Module or a sequence of them, not the class Linear, which is to be called: "
        "pass the model itself, or amp.session(opt_level=...) for code without one",
    ),
    "level-first": (
        False,
        lambda g: g.init(["O1"]),
        T,
        "models must hold torch.nn.Module objects, not str: pass the model itself, or amp.session(opt_level=...) "
        "for code without one",
    ),
    "swapped": (
        False,
        lambda g: g.init(g.opt, g.model),
        T,
        "models must be a torch.nn.Module or a sequence of them, not SGD: models come first, then optimizers",
    ),
    "model-as-optimizer": (
        False,
        lambda g: g.init(g.model, g.model),
        T,
        "optimizers must be torch.optim.Optimizer objects, not Linear: pass the one that was made of its parameters",
    ),
    "parameters": (
        False,
        lambda g: g.init(g.model, g.model.parameters()),
        T,
        "optimizers must be torch.optim.Optimizer objects, not Parameter: make one of the parameters first, as "
        "torch.optim.SGD(model.parameters(), lr=0.1)",
    ),
    "optimizer-class": (
        False,
        lambda g: g.init(g.model, torch.optim.SGD),
        T,
        "optimizers must be torch.optim.Optimizer objects, not the class SGD, which is to be called: pass what "
        "torch.optim.SGD(...) and the like return",
    ),
    "scheduler": (
        False,
        lambda g: g.init(g.model, torch.optim.lr_scheduler.StepLR(g.opt, 1)),
        T,
        "optimizers must be torch.optim.Optimizer objects, not StepLR: pass the optimizer of this StepLR",
    ),
    "no-models": (
        False,
        lambda g: g.init([], g.opt),
        amp.ModelError,
        "initialize needs at least one model; use amp.session(opt_level=...) for code without one",
    ),
    "level-number": (
        False,
        lambda g: g.init(opt_level=1),
        P,
        "opt_level 1 is not a preset (O0, O1, O2, O3, O4, O5). Did you mean 'O1'? The first character is the letter O.",
    ),
    "num-losses": (
        False,
        lambda g: g.init(num_losses="2"),
        T,
        "num_losses='2' must be a whole number of at least 1: how many losses have a scale of their own",
    ),
    "verbosity": (
        False,
        lambda g: g.init(verbosity="loud"),
        T,
        "verbosity='loud' is no whole number: pass 0 for no messages on stdout, 1 for the usual ones, or 2 for "
        "the parameters of each overflow too",
    ),
    "presets": (
        False,
        lambda g: g.init(presets=3),
        P,
        "presets=3 is no path: pass that of a presets file, or leave it out",
    ),
    "lists": (
        False,
        lambda g: g.init(lists=3),
        P,
        "opt_level 'O1' cannot be combined with these arguments:\n  - lists=3 is neither a name, a path, nor a "
        "sequence of those",
    ),
    "group": (
        False,
        lambda g: g.init(overflow_group="all"),
        T,
        "overflow_group: torch.distributed has no process group yet: make one first, by init_process_group, or "
        "leave overflow_group out",
    ),
    "outputs": (
        False,
        lambda g: g.init(cast_model_outputs="float61"),
        P,
        "opt_level 'O1' cannot be combined with these arguments:\n  - cast_model_outputs='float61' is not a dtype "
        "to train in (float16, bfloat16, float32). Did you mean 'float16'?",
    ),
    "scale-true": (
        False,
        lambda g: g.init(loss_scale=True),
        P,
        "opt_level 'O1' cannot be combined with these arguments:\n  - loss_scale=True is neither a finite positive "
        "number nor 'dynamic' nor a mapping of init, growth_factor, backoff_factor, growth_interval, hysteresis.",
    ),
    "highest-scale-true": (
        False,
        lambda g: g.init(max_loss_scale=True),
        P,
        "opt_level 'O1' cannot be combined with these arguments:\n  - max_loss_scale=True: True is no number",
    ),
    "interval-as-fraction": (
        False,
        lambda g: g.init(loss_scale={"growth_interval": 2.0}),
        P,
        "opt_level 'O1' cannot be combined with these arguments:\n  - loss_scale={'growth_interval': 2.0}: "
        "growth_interval=2.0 must be a whole number from 1 to 2147483647",
    ),
    "lowest-scale": (
        False,
        lambda g: g.init(min_loss_scale="small"),
        P,
        "opt_level 'O1' cannot be combined with these arguments:\n  - min_loss_scale='small': 'small' is no number",
    ),
    "device": (
        False,
        lambda g: amp.session(device="gpu").__enter__(),
        V,
        "device='gpu' is none that torch knows: pass one such as 'cuda', 'cpu' or 'mps', or leave it out for the "
        "accelerator, if there is one. Did you mean 'cuda'?",
    ),
    "device-number": (
        False,
        lambda g: amp.session(device=1.5).__enter__(),
        T,
        "device=1.5 is neither text nor a torch.device: pass one such as 'cuda' or 'cpu', or leave it out for the"
        " accelerator, if there is one",
    ),
    "session-o2": (
        False,
        lambda g: amp.session("O2").__enter__(),
        P,
        "opt_level 'O2' casts models and patches no functions, so code without a model would run in float32. "
        "Levels that patch functions: O1, O4. To cast a model, pass it to initialize.",
    ),
    "session-verbosity": (
        False,
        lambda g: amp.session(verbosity=None).__enter__(),
        T,
        "verbosity=None is no whole number: pass 0 for no messages on stdout, 1 for the usual ones, or 2 for the "
        "parameters of each overflow too",
    ),
    "scope-option": (
        False,
        lambda g: amp.scope(g.model, optlevel="O1").__enter__(),
        T,
        "scope takes no argument 'optlevel': it takes those of initialize. Did you mean 'opt_level'?",
    ),
    "scope-replace": (
        False,
        lambda g: amp.scope(g.model, replace=True).__enter__(),
        T,
        "scope takes no `replace`, since it closes no other session: call amp.reset() first",
    ),
    "scope-nested": (
        True,
        lambda g: amp.scope(g.model, g.opt, opt_level="O1").__enter__(),
        S,
        "opt_level O1 is in force already: call amp.reset() first, or leave the block you are in",
    ),
    "not-initialized": (
        False,
        lambda g: amp.scale_loss(g.loss, g.opt),
        S,
        "amp.initialize has not been called yet (or amp.reset() has been since): call it before anything else",
    ),
    "loss-number": (
        True,
        lambda g: amp.scale_loss(0.5, g.opt),
        T,
        "scale_loss takes the loss as a tensor, not float: pass what the loss function returns, and not its .item()",
    ),
    "loss-integer": (
        True,
        lambda g: amp.scale_loss(torch.tensor(3), g.opt),
        T,
        "the loss is int64, and only a floating one has gradients: pass it as it is before any .argmax(), "
        "comparison or .long()",
    ),
    "loss-complex": (
        True,
        lambda g: amp.scale_loss(torch.tensor(3j), g.opt),
        T,
        "the loss is complex64, and only a floating one has gradients: pass it as it is before any .argmax(), "
        "comparison or .long()",
    ),
    "loss-no-optimizer": (
        True,
        lambda g: amp.scale_loss(g.loss, None),
        T,
        "scale_loss needs the optimizers whose parameters the loss reaches: pass one, or a list of them, after "
        "the loss",
    ),
    "loss-model": (
        True,
        lambda g: amp.scale_loss(g.loss, g.model),
        T,
        "optimizers must be torch.optim.Optimizer objects, not Linear: pass the one that was made of its parameters",
    ),
    "loss-id-text": (
        True,
        lambda g: amp.scale_loss(g.loss, g.opt, "0"),
        T,
        "loss_id='0' is no whole number: pass 0 for the first loss scaler",
    ),
    "loss-id-negative": (
        True,
        lambda g: amp.scale_loss(g.loss, g.opt, -1),
        amp.LossIdError,
        "loss_id -1 is out of range for 1 loss scalers: they are numbered from 0, and initialize(num_losses=...) "
        "says how many there are",
    ),
    "no-with": (
        True,
        lambda g: amp.scale_loss(g.loss, g.opt).backward(),
        S,
        "scale_loss(...) is a context manager: write `with amp.scale_loss(loss, optimizer) as scaled_loss: "
        "scaled_loss.backward()`, and step after the block",
    ),
    "scale-number": (
        True,
        lambda g: amp.scale(0.5),
        T,
        "0.5 is no tensor, nor a container of tensors: pass the loss itself, and not its .item()",
    ),
    "unscale-number": (
        True,
        lambda g: amp.unscale(0.5),
        T,
        "0.5 is no tensor, nor a container of tensors: pass the loss itself, and not its .item()",
    ),
    "scale-loss-id": (
        True,
        lambda g: amp.scale(g.loss, 5),
        amp.LossIdError,
        "loss_id 5 is out of range for 1 loss scalers: they are numbered from 0, and initialize(num_losses=...) "
        "says how many there are",
    ),
    "masters-of-model": (
        True,
        lambda g: amp.master_params(g.model),
        T,
        "master_params takes the optimizer, not Linear: `for p in amp.master_params(optimizer)`",
    ),
    "masters-of-list": (
        True,
        lambda g: amp.master_params([g.opt]),
        T,
        "master_params takes one optimizer at a time, not list: `for p in amp.master_params(optimizer)`",
    ),
    "state-into": (
        True,
        lambda g: amp.state_dict("amp.pt"),
        T,
        "destination must be a dictionary to add entries to, not str: leave it out for a new one",
    ),
    "load-none": (
        True,
        lambda g: amp.load_state_dict(None),
        T,
        "load_state_dict takes what amp.state_dict() returned, not NoneType: save it beside the model's, as "
        "{'amp': amp.state_dict()}, and pass torch.load(path)['amp']",
    ),
    "load-path": (
        True,
        lambda g: amp.load_state_dict("amp.pt"),
        T,
        "load_state_dict takes what amp.state_dict() returned, not str: save it beside the model's, as {'amp': "
        "amp.state_dict()}, and pass torch.load(path)['amp']",
    ),
    "load-checkpoint": (
        True,
        lambda g: amp.load_state_dict({"model": {}, "amp": amp.state_dict()}),
        amp.CheckpointError,
        "the saved amp state holds model, amp, but this session has 1 loss scalers (loss_scaler0): pass the entry"
        " 'amp' of this checkpoint",
    ),
    "load-other": (
        True,
        lambda g: amp.load_state_dict(g.opt.state_dict()),
        amp.CheckpointError,
        "the saved amp state holds state, param_groups, but this session has 1 loss scalers (loss_scaler0): pass "
        "what amp.state_dict() returned",
    ),
    "load-mixed": (
        True,
        lambda g: amp.load_state_dict({0: 1, "a": 2}),
        amp.CheckpointError,
        "the saved amp state holds 0, a, but this session has 1 loss scalers (loss_scaler0): pass what "
        "amp.state_dict() returned",
    ),
    "load-entry": (
        True,
        lambda g: amp.load_state_dict({"loss_scaler0": None}),
        amp.CheckpointError,
        "the saved amp state cannot be read: loss_scaler0 is None, without loss_scale and unskipped; each entry "
        "is as {'loss_scale': 65536.0, 'unskipped': 0}",
    ),
    "load-part": (
        True,
        lambda g: amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0}}),
        amp.CheckpointError,
        "the saved amp state cannot be read: loss_scaler0 is {'loss_scale': 1.0}, without unskipped; each entry "
        "is as {'loss_scale': 65536.0, 'unskipped': 0}",
    ),
    "load-word": (
        True,
        lambda g: amp.load_state_dict({"loss_scaler0": {"loss_scale": "x", "unskipped": 0}}),
        amp.CheckpointError,
        "the saved amp state cannot be read: could not convert string to float: 'x'; each entry is as "
        "{'loss_scale': 65536.0, 'unskipped': 0}",
    ),
    "load-scalers": (
        True,
        lambda g: amp.load_state_dict({"loss_scaler0": {}, "loss_scaler1": {}}),
        amp.CheckpointError,
        "the saved amp state holds loss_scaler0, loss_scaler1, but this session has 1 loss scalers "
        "(loss_scaler0): pass the same num_losses to initialize",
    ),
    "register-text": (
        False,
        lambda g: amp.register_half_function("torch", "matmul"),
        T,
        "register_half_function takes a module or class itself and a name in it as text, and was given the owner "
        "as text, 'torch': write register_half_function(torch, 'matmul')",
    ),
    "register-function": (
        False,
        lambda g: amp.register_float_function(torch, torch.matmul),
        T,
        "register_float_function takes a module or class itself and a name in it as text, and was given the name "
        "as builtin_function_or_method: write register_float_function(torch, 'matmul')",
    ),
    "register-missing": (
        False,
        lambda g: amp.register_promote_function(torch, "matmull"),
        V,
        "torch has no function 'matmull' to register: name one that it has. Did you mean 'matmul'?",
    ),
    "register-constant": (
        False,
        lambda g: amp.register_half_function(torch, "pi"),
        T,
        "torch.pi is not callable, so it cannot be registered: name a function",
    ),
    "decorate-result": (
        False,
        lambda g: amp.half_function(torch.ones(1)),
        T,
        "half_function decorates a function, not Tensor: pass the function itself; register_half_function takes "
        "one by its module and name",
    ),
    "patched-text": (
        False,
        lambda g: amp.is_patched("torch", "matmul"),
        T,
        "is_patched takes a module or class itself and a name in it as text, and was given the owner as text, "
        "'torch': write is_patched(torch, 'matmul')",
    ),
    "original-text": (
        False,
        lambda g: amp.get_original("torch.Tensor", "exp"),
        T,
        "get_original takes a module or class itself and a name in it as text, and was given the owner as text, "
        "'torch.Tensor': write get_original(torch.Tensor, 'exp')",
    ),
    "original-missing": (
        True,
        lambda g: amp.get_original(torch, "matmull"),
        V,
        "torch has no 'matmull': name a function that it has. Did you mean 'matmul'?",
    ),
    "fsdp-level": (
        False,
        lambda g: amp.fsdp_policy("O9"),
        P,
        "opt_level 'O9' is not a preset (O0, O1, O2, O3, O4, O5).",
    ),
    "fsdp-module": (
        False,
        lambda g: amp.fsdp_policy("O2", "norm"),
        T,
        "module must be the torch.nn.Module that is sharded, not str: pass it, or leave it out",
    ),
    "fsdp-dtype": (
        False,
        lambda g: amp.fsdp_policy("O2", reduce_dtype="float32"),
        T,
        "reduce_dtype='float32' is no torch.dtype: pass torch.float32, or leave it out",
    ),
    "explain-result": (
        True,
        lambda g: insight.explain(g.loss),
        T,
        "step must be a function without arguments, not Tensor: pass the function itself, and not what it returns",
    ),
    "explain-steps": (
        True,
        lambda g: insight.explain(g.init, steps=0),
        V,
        "steps=0 must be at least 1: pass 1 or more",
    ),
    "record-alone": (
        False,
        lambda g: insight.recording().__enter__(),
        S,
        "amp.initialize has not been called yet (or amp.reset() has been since): call it before anything else",
    ),
    "trace-fault": (
        True,
        lambda g: insight.trace(g.init, on_fault="stop"),
        V,
        "on_fault='stop' is neither 'raise' nor 'record': pass one of them",
    ),
    "trace-share": (
        True,
        lambda g: insight.trace(g.init, underflow=5),
        V,
        "underflow=5 is a share of values: pass a number from 0 to 1, or None",
    ),
    "trace-ignore": (
        True,
        lambda g: insight.trace(g.init, ignore="exp"),
        T,
        "ignore='exp' must be a sequence of names: write ignore=['exp']",
    ),
    "compare-runs": (
        False,
        lambda g: insight.compare(g.init, "O1"),
        T,
        "runs='O1' must be a sequence of names: write runs=['O1']",
    ),
    "compare-result": (
        False,
        lambda g: insight.compare(None),
        T,
        "train must be a function without arguments, not NoneType: pass the function itself, and not what it returns",
    ),
    "tune-units": (
        False,
        lambda g: insight.tune(g.init, units="layers"),
        V,
        "units='layers' is none of modules, ops, both. Did you mean 'modules'?",
    ),
    "tune-runs": (
        False,
        lambda g: insight.tune(g.init, max_runs=1),
        V,
        "max_runs=1 must be at least 2: pass 2 or more",
    ),
    "tune-steps": (
        False,
        lambda g: insight.tune(g.init, steps="2"),
        T,
        "steps='2' is no whole number: pass 1 or more",
    ),
    "tracker": (
        False,
        lambda g: Tracker(3),
        T,
        "int is no tracker: pass a SummaryWriter, a run of Weights & Biases, or a function log(tag, value, step)",
    ),
    "tracker-every": (
        False,
        lambda g: Tracker(print, every=0.5),
        T,
        "every=0.5 must be a whole number of at least 1: the steps between two entries",
    ),
    "trace-share-text": (
        True,
        lambda g: insight.trace(g.init, underflow="all"),
        V,
        "underflow='all' is a share of values: pass a number from 0 to 1, or None",
    ),
    "tune-tolerance": (
        False,
        lambda g: insight.tune(g.init, tolerance="10%"),
        V,
        "tolerance='10%' must be a number above 0: pass 0.1 for a tenth of a gradient",
    ),
    "apex-verbosity": (
        False,
        lambda g: apex_amp.initialize(g.model, g.opt, verbosity="loud"),
        T,
        "verbosity='loud' is no whole number: pass 0 for no messages on stdout, 1 for the usual ones, or 2 for "
        "the parameters of each overflow too",
    ),
    "apex-load": (
        True,
        lambda g: apex_amp.load_state_dict(None),
        T,
        "load_state_dict takes what amp.state_dict() returned, not NoneType: save it beside the model's, as "
        "{'amp': amp.state_dict()}, and pass torch.load(path)['amp']",
    ),
    "apex-masters": (
        True,
        lambda g: apex_amp.master_params(g.model),
        T,
        "master_params takes the optimizer, not Linear: `for p in amp.master_params(optimizer)`",
    ),
    "apex-loss": (
        True,
        lambda g: apex_amp.scale_loss(0.5, g.opt).__enter__(),
        T,
        "scale_loss takes the loss as a tensor, not float: pass what the loss function returns, and not its .item()",
    ),
    "apex-register": (
        False,
        lambda g: apex_amp.register_half_function("torch", "matmul"),
        T,
        "register_half_function takes a module or class itself and a name in it as text, and was given the owner "
        "as text, 'torch': write register_half_function(torch, 'matmul')",
    ),
    "disabled-no-with": (
        None,
        lambda g: amp.scale_loss(g.loss, g.opt).backward(),
        S,
        "scale_loss(...) is a context manager: write `with amp.scale_loss(loss, optimizer) as scaled_loss: "
        "scaled_loss.backward()`, and step after the block",
    ),
    "apex-lists": (
        False,
        lambda g: apex.install(lists="mine.yaml"),
        T,
        "lists='mine.yaml' must be a sequence of lists: write lists=['mine.yaml']",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_says_what_was_wrong_and_what_to_do(name):
    needs_session, call, error, text = CALLS[name]
    given = Given()
    if needs_session is not False:
        given.init(enabled=needs_session is True)
    with pytest.raises(Exception) as raised:
        call(given)
    assert raised.type is error and str(raised.value) == text


def test_each_error_is_the_builtin_that_a_caller_would_catch():
    builtins = {T: TypeError, V: ValueError, P: ValueError, S: RuntimeError, amp.LossIdError: IndexError}
    for _, _, error, _ in CALLS.values():
        assert issubclass(error, (amp.AmpError,)) and issubclass(error, builtins.get(error, ValueError))
