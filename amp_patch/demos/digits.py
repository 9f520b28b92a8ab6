"""Handwritten digits at every opt_level: a small convolutional network with BatchNorm, one row for each level."""

from ..dtypes import dtype_name
from ..hardware import explain_products, has_low_products
from ..tables import format_table
from .catalogue import Options
from .digits_training import TrainResult, load_digits_tensors, train
from .picture import COLOURS, Curve, draw_losses, make_figure
from .training import make_bar

COLUMNS = (
    "level",
    "low dtype",
    "accuracy",
    "final loss",
    "ms/step",
    "skipped",
    "loss scale",
    "names patched",
    "params low",
    "params float32",
)


def run(options: Options) -> None:
    """Train at each level asked for, in order; print the table and write the loss curves of all into one picture."""
    digits = load_digits_tensors(options.device)
    results = []
    with make_bar(len(options.levels) * options.steps) as bar:
        for level in options.levels:
            bar.set_description(level)
            results.append(train(level, digits, steps=options.steps, seed=options.seed, on_step=bar.update))
    print(format_table(COLUMNS, map(_cells, results), left=2))
    for low in dict.fromkeys(result.low_dtype for result in results):
        if low is not None and not has_low_products(options.device.type, low):
            print(f"\n{explain_products(options.device.type, low)}; for speed here, use O0")
    if options.plot:
        figure, (axes,) = make_figure()
        draw_losses(axes, [_curve(result) for result in results])
        axes.set_title("Handwritten digits at each opt_level", loc="left")
        figure.savefig(options.plot)
        print(f"\nloss curves: {options.plot}")


def _cells(result: TrainResult) -> tuple[str, ...]:
    """The cells of one level, in the order of `COLUMNS`."""
    return (
        result.level,
        dtype_name(result.low_dtype),
        f"{result.accuracy:.2f} %",
        f"{result.final_loss:.4f}",
        f"{result.ms_per_step:.2f}",
        str(result.steps_skipped),
        f"{result.loss_scale:g}",
        str(result.names_patched),
        f"{result.parameters_low:,}",
        f"{result.parameters_float32:,}",
    )


def _curve(result: TrainResult) -> Curve:
    dtype = dtype_name(result.low_dtype) if result.low_dtype else "float32"
    return Curve(f"{result.level} {dtype}  {result.accuracy:.1f} %", result.losses, COLOURS[result.level])
