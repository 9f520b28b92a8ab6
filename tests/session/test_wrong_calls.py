"""The error of a wrong call of a public function has its class, names the wrong value, and says what to do.

Guards: session/arguments, session/current, errors, functions, api, dtypes.
"""

import re
from functools import partial

import pytest
import torch
from torch import nn

import amp_patch as amp
from amp_patch import apex, insight
from amp_patch.apex import amp as apex_amp
from amp_patch.integrations.trackers import Tracker

T, V, P, S, C = amp.ArgumentTypeError, amp.ArgumentValueError, amp.PolicyError, amp.SessionError, amp.CheckpointError
MODEL = nn.Linear(3, 3)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
LOSS = torch.ones((), requires_grad=True)
start = partial(amp.initialize, MODEL, OPTIMIZER, verbosity=0)
half, entry = amp.register_half_function, {"loss_scale": 1.0}
scheduler = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)

# The call, the class of its error, and words of the message: what was given, and of the remedy.
WITHOUT_SESSION = [
    (lambda: amp.initialize(None, OPTIMIZER), T, "not NoneType: pass the model"),
    (lambda: amp.initialize(nn.Linear), T, "the class Linear"),
    (lambda: amp.initialize(["O1"]), T, "not str: pass the model"),
    (lambda: amp.initialize(OPTIMIZER, MODEL), T, "not SGD: models come first"),
    (lambda: amp.initialize(MODEL, MODEL), T, "not Linear: pass the optimizer of its parameters"),
    (lambda: amp.initialize(MODEL, MODEL.parameters()), T, "not Parameter: make an optimizer of the parameters"),
    (lambda: amp.initialize(MODEL, torch.optim.SGD), T, "the class SGD"),
    (lambda: amp.initialize(MODEL, scheduler), T, "not StepLR: pass the optimizer of this StepLR"),
    (lambda: start(opt_level=1), P, "opt_level 1 .*Did you mean 'O1'"),
    (lambda: start(num_losses="2"), T, "num_losses='2' must be a whole number"),
    (lambda: start(verbosity="loud"), T, "verbosity='loud'"),
    (lambda: start(presets=3), P, "presets=3 is not a path"),
    (lambda: start(lists=3), P, "lists=3 is neither a name, a path"),
    (lambda: start(overflow_group="all"), T, "no process group yet: make one first"),
    (lambda: start(cast_model_outputs="float61"), P, "cast_model_outputs='float61'.*Did you mean 'float16'"),
    (lambda: start(loss_scale=True), P, "loss_scale=True is neither"),
    (lambda: start(max_loss_scale=True), P, "max_loss_scale=True"),
    (lambda: start(loss_scale={"growth_interval": 2.0}), P, "growth_interval=2.0 must be a whole number"),
    (lambda: start(min_loss_scale="small"), P, "min_loss_scale='small'"),
    (lambda: amp.session(device="gpu").__enter__(), V, "device='gpu'.*Did you mean 'cuda'"),
    (lambda: amp.session(device=1.5).__enter__(), T, "device=1.5 is neither text nor a torch.device"),
    (lambda: amp.session("O2").__enter__(), P, "O1, O4. To cast a model, pass it to initialize"),
    (lambda: amp.scope(MODEL, optlevel="O1").__enter__(), T, "'optlevel'.*Did you mean 'opt_level'"),
    (lambda: start(level="O1"), T, "initialize takes no argument 'level'.*Did you mean 'opt_level'"),
    (lambda: start(opt_lvl="O1"), T, "Did you mean 'opt_level'"),
    (lambda: start(optlevel="O1"), T, "Did you mean 'opt_level'"),
    (lambda: start(half_dtype=torch.half), T, "initialize takes no argument 'half_dtype': it takes models, "),
    (lambda: amp.session(level="O1"), T, "session takes no argument 'level'.*Did you mean 'opt_level'"),
    (lambda: apex_amp.initialize(MODEL, level="O1"), T, "Did you mean 'opt_level'"),
    (lambda: amp.scope(MODEL, replace=True).__enter__(), T, "no `replace`.*call amp.reset"),
    (lambda: amp.scale_loss(LOSS, OPTIMIZER), S, "amp.initialize has not been called yet"),
    (lambda: half("torch", "matmul"), T, "not the text 'torch': write register_half_function.torch, 'matmul'"),
    (lambda: amp.register_float_function(torch, torch.matmul), T, "write register_float_function.torch, 'matmul'"),
    (lambda: amp.register_promote_function(torch, "matmull"), V, "no function 'matmull'.*Did you mean 'matmul'"),
    (lambda: half(torch, "pi"), T, "torch.pi is not callable"),
    (lambda: amp.half_function(torch.ones(1)), T, "not Tensor: pass the function itself"),
    (lambda: amp.is_patched("torch", "matmul"), T, "write is_patched.torch, 'matmul'"),
    (lambda: amp.get_original("torch.Tensor", "exp"), T, "write get_original.torch.Tensor, 'exp'"),
    (lambda: amp.get_original(torch, "matmull"), V, "no 'matmull'.*Did you mean 'matmul'"),
    (lambda: amp.fsdp_policy("O9"), P, "opt_level 'O9' is not a preset"),
    (lambda: amp.fsdp_policy("O2", "norm"), T, "not str: pass it, or leave it out"),
    (lambda: amp.fsdp_policy("O2", reduce_dtype="float32"), T, "reduce_dtype='float32'.*pass torch.float32"),
    (lambda: insight.compare(start, "O1"), T, "runs='O1'.*write runs=.'O1'"),
    (lambda: insight.compare(start, ["O0", "O9"]), P, "opt_level 'O9' is not a preset .*O4.* as-is"),
    (lambda: insight.compare(start, reference="o4"), P, "Did you mean 'O4'"),
    (lambda: insight.compare(start, [4]), T, "4 is not a run"),
    (lambda: insight.compare(start, ["O1+no_such_file.yaml"]), amp.OpListError, "no such file"),
    (lambda: insight.compare(None), T, "not NoneType: pass the function itself"),
    (lambda: insight.tune(start, units="layers"), V, "units='layers'.*Did you mean 'modules'"),
    (lambda: insight.tune(start, max_runs=1), V, "max_runs=1 must be at least 2"),
    (lambda: insight.tune(start, steps="2"), T, "steps='2' is not a whole number"),
    (lambda: insight.tune(start, tolerance="10%"), V, "tolerance='10%' must be a number above 0"),
    (lambda: Tracker(3), T, "int is not a tracker: pass a SummaryWriter"),
    (lambda: Tracker(print, every=0.5), T, "every=0.5 must be a whole number"),
    (lambda: apex_amp.initialize(MODEL, OPTIMIZER, verbosity="loud"), T, "verbosity='loud'"),
    (lambda: apex.install(lists="mine.yaml"), T, "lists='mine.yaml'.*write lists=.'mine.yaml'"),
]
IN_SESSION = [
    (lambda: amp.scope(MODEL, OPTIMIZER, opt_level="O1").__enter__(), S, "O1 is in force already: call amp.reset"),
    (lambda: amp.scale_loss(0.5, OPTIMIZER), T, "not float: pass the result of the loss function"),
    (lambda: amp.scale_loss(torch.tensor(3), OPTIMIZER), T, "the loss is int64"),
    (lambda: amp.scale_loss(torch.tensor(3j), OPTIMIZER), T, "the loss is complex64"),
    (lambda: amp.scale_loss(LOSS.to("meta"), OPTIMIZER), S, "the loss is on meta"),
    (
        lambda: amp.scale_loss(LOSS, torch.optim.SGD(MODEL.parameters())),
        amp.OptimizerError,
        "was not passed to initialize",
    ),
    (lambda: amp.scale_loss(OPTIMIZER, LOSS), T, "not Tensor: .* the loss first, so write scale_loss.loss, optimizer."),
    (lambda: apex_amp.scale_loss(OPTIMIZER, LOSS).__enter__(), T, "the loss first"),
    (lambda: apex_amp.scale_loss(LOSS, OPTIMIZER).backward(), S, "with amp.scale_loss.loss, optimizer. as scaled_loss"),
    (lambda: amp.scale_loss(LOSS, None), T, "needs the optimizers.*pass one, or a list of them"),
    (lambda: amp.scale_loss(LOSS, MODEL), T, "not Linear: pass the optimizer of its parameters"),
    (lambda: amp.scale_loss(LOSS, OPTIMIZER, "0"), T, "loss_id='0' is not a whole number"),
    (lambda: amp.scale_loss(LOSS, OPTIMIZER, -1), amp.LossIdError, "loss_id -1 .*num_losses"),
    (lambda: amp.scale_loss(LOSS, OPTIMIZER).backward(), S, "with amp.scale_loss.loss, optimizer. as scaled_loss"),
    (lambda: amp.scale(0.5), T, "0.5 is not a tensor.*pass the loss itself"),
    (lambda: amp.unscale(0.5), T, "0.5 is not a tensor.*pass the loss itself"),
    (lambda: amp.scale(LOSS.detach().numpy()[()]), T, "is not a tensor.*pass the loss itself"),
    (lambda: amp.scale(LOSS, 5), amp.LossIdError, "loss_id 5 .*num_losses"),
    (lambda: amp.master_params(MODEL), T, "takes the optimizer, not Linear"),
    (lambda: amp.master_params([OPTIMIZER]), T, "one optimizer at a time, not list"),
    (lambda: amp.state_dict("amp.pt"), T, "destination must be a dictionary"),
    (lambda: amp.load_state_dict(None), T, "not NoneType: .*amp.state_dict"),
    (lambda: amp.load_state_dict("amp.pt"), T, "not str: .*torch.load.path..'amp'"),
    (lambda: amp.load_state_dict({"model": {}, "amp": amp.state_dict()}), C, "holds model, amp.*pass the entry 'amp'"),
    (
        lambda: amp.load_state_dict(OPTIMIZER.state_dict()),
        C,
        "holds state, param_groups.*pass the result of amp.state_dict",
    ),
    (lambda: amp.load_state_dict({0: 1, "a": 2}), C, "holds 0, a"),
    (lambda: amp.load_state_dict({"loss_scaler0": None}), C, "loss_scaler0 is None, without loss_scale and unskipped"),
    (lambda: amp.load_state_dict({"loss_scaler0": entry}), C, "without unskipped"),
    (lambda: amp.load_state_dict({"loss_scaler0": {"loss_scale": "x", "unskipped": 0}}), C, "to float: 'x'"),
    (lambda: amp.load_state_dict({"loss_scaler0": {}, "loss_scaler1": {}}), C, "pass the same num_losses"),
    (lambda: amp.load_state_dict(amp.state_dict({"epoch": 1})), C, "1 loss scaler .*pass its entries without epoch"),
    (lambda: insight.explain(LOSS), T, "not Tensor: pass the function itself"),
    (lambda: insight.explain(start, steps=0), V, "steps=0 must be at least 1"),
    (lambda: insight.trace(start, on_fault="stop"), V, "on_fault='stop' is neither 'raise' nor 'record'"),
    (lambda: insight.trace(start, underflow=5), V, "underflow=5 .*from 0 to 1"),
    (lambda: insight.trace(start, underflow="all"), V, "underflow='all' .*from 0 to 1"),
    (lambda: insight.trace(start, ignore="exp"), T, "ignore='exp'.*write ignore=.'exp'"),
    (lambda: apex_amp.scale_loss(0.5, OPTIMIZER).__enter__(), T, "not float: pass the result of the loss function"),
]
DISABLED = [
    (lambda: amp.scale_loss(LOSS, OPTIMIZER).backward(), S, "with amp.scale_loss.loss, optimizer. as scaled_loss")
]
BUILTINS = {T: TypeError, V: ValueError, P: ValueError, S: RuntimeError, C: ValueError}
BUILTINS |= {amp.OpListError: ValueError, amp.LossIdError: IndexError, amp.OptimizerError: ValueError}


def find_fault(call, error, words):
    """What is wrong with the error of a call, or None."""
    try:
        call()
    except Exception as raised:
        is_right = type(raised) is error and isinstance(raised, amp.AmpError) and isinstance(raised, BUILTINS[error])
        return None if is_right and re.search(words, str(raised), re.DOTALL) else (words, repr(raised))
    return words, "nothing was raised"


@pytest.mark.parametrize(
    ("calls", "options"),
    [(WITHOUT_SESSION, None), (IN_SESSION, {}), (DISABLED, {"enabled": False})],
    ids=["no session", "in a session", "disabled"],
)
def test_a_wrong_call_says_what_was_wrong_and_what_to_do_and_changes_nothing(calls, options):
    if options is not None:
        start(**options)
    before = amp.stats()
    assert [fault for case in calls if (fault := find_fault(*case)) is not None] == []
    assert amp.stats() == before
