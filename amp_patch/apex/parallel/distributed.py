"""`DistributedDataParallel` with Apex's arguments on top of torch's, `Reducer`, and collectives on flattened tensors.

All of them need an initialized process group, and take the devices and floating dtypes that its backend supports.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...torch_distributed import sync_module_states
from ...torch_private import foreach_copy_, get_backward_id, queue_after_backward
from .._core import find_session
from ..apex_C import flatten as flatten
from ..apex_C import unflatten as unflatten

_BROADCAST_BYTES = 250 * 2**20  # about the largest size of one broadcast, as in torch's DistributedDataParallel


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are reduced over the ranks.

    Attributes:
        world_size: the number of ranks.
        averages: compute the average. If False, compute the sum, divided by `predivide`.
        predivide: the number by which gradients are divided before they are summed; 1 for no division. The sum is
            multiplied by it again for the average.
        in_float32: divide and sum 16-bit gradients in float32, and round once.
    """

    world_size: int
    averages: bool
    predivide: float
    in_float32: bool

    def start(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Start to reduce `buffer` in place. The value of the returned future is `buffer`."""
        total = buffer.float() if self.in_float32 and buffer.dtype in (torch.float16, torch.bfloat16) else buffer
        if self.predivide != 1.0:
            total.div_(self.predivide)
        work = dist.all_reduce(total, async_op=True)

        def finish(_: torch.futures.Future[Any]) -> Tensor:
            if self.averages:
                total.mul_(self.predivide / self.world_size)
            return buffer if total is buffer else buffer.copy_(total)

        future: torch.futures.Future[Tensor] = work.get_future().then(finish)
        return future


def reduce_bucket(state: Reduction, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Reduce a bucket as `state` says. A communication hook for torch's DistributedDataParallel."""
    return state.start(bucket.buffer())


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with Apex's arguments. Parameters are broadcast from rank 0, buffers never.

    Args:
        module: a module on its device, after `amp.initialize`.
        delay_allreduce: reduce all gradients at the end of each backward pass, instead of during it. Then a parameter
            may get a gradient on some ranks only; on the others, the gradient counts as zero. Also, several backward
            passes may follow one forward pass; torch's reducer would leave the gradients of the later passes unreduced,
            without an error. Waits for the device once in each backward pass.
        allreduce_always_fp32: sum 16-bit gradients in float32.
        gradient_average: divide by the number of ranks. If False, zero the gradients before each backward pass, or a
            later pass sums earlier sums again.
        gradient_predivide_factor: divide gradients by it before the sum, and multiply the average by it afterwards.
        shared_param, message_size, allreduce_trigger_params, retain_allreduce_buffers, num_allreduce_streams,
        allreduce_communicators, gradient_average_split_factor, prof: without effect.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        with warnings.catch_warnings():
            # newer torch recommends another argument, but with that, buffers are broadcast once
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(module, broadcast_buffers=False)
        self._reduction = Reduction(
            dist.get_world_size(), gradient_average, gradient_predivide_factor, allreduce_always_fp32
        )
        self.delay_allreduce = delay_allreduce
        self._reduced_pass = -1
        self.enable_allreduce()
        if delay_allreduce:
            reference = weakref.ref(self)  # the hooks live on the parameters, which may outlive the wrapper

            def reduce_later(_: Tensor) -> None:
                wrapper = reference()
                if wrapper is not None:
                    wrapper.reduce_after_backward()

            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(reduce_later)
        elif allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            self.register_comm_hook(self._reduction, reduce_bucket)

    def enable_allreduce(self) -> None:
        """Reduce gradients in backward passes whose forward comes after this call. With `delay_allreduce`, reduce them
        in all backward passes after this call.
        """
        self._set_allreduce(True)

    def disable_allreduce(self) -> None:
        """Do not reduce gradients in backward passes whose forward comes after this call. With `delay_allreduce`, do
        not reduce them in any backward pass after this call.
        """
        self._set_allreduce(False)

    def _set_allreduce(self, is_on: bool) -> None:
        self._is_reducing = is_on
        # this flag is for torch's own reducer, which does nothing under `delay_allreduce`
        self.require_backward_grad_sync = is_on and not self.delay_allreduce

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager: `disable_allreduce` in the block, and restore the earlier setting."""
        before = self._is_reducing
        self._set_allreduce(False)
        try:
            yield
        finally:
            self._set_allreduce(before)

    def leaves_gradients_local(self) -> bool | None:
        """Return whether a backward pass that runs now would leave gradients unreduced.

        Return None without `delay_allreduce`, because the setting at the time of the forward pass decides, as in torch.
        """
        return not self._is_reducing if self.delay_allreduce else None

    def reduce_after_backward(self) -> None:
        """In a backward pass: reduce the gradients of all parameters at its end, once, unless reducing is disabled."""
        pass_id = get_backward_id()
        if self._is_reducing and pass_id != self._reduced_pass:  # every parameter's hook calls this
            self._reduced_pass = pass_id
            queue_after_backward(self._reduce_all)

    def _reduce_all(self) -> None:
        params = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        has_gradient = torch.tensor(
            [parameter.grad is not None for parameter in params], dtype=torch.int32, device=params[0].device
        )
        # every rank must reduce the same tensors, so find the parameters that have a gradient on any rank
        dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX)
        gradients = []
        for parameter, is_used in zip(params, has_gradient.tolist(), strict=True):
            if is_used:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients.append(parameter.grad)
        flat_dist_call(gradients, lambda flat: self._reduction.start(flat).wait())


class Reducer:
    """Averages gradients over the ranks on request, for custom training loops.

    Args:
        module_or_grads_list: a module, or tensors in any nesting of lists, tuples and dicts. The constructor broadcasts
            the parameters of a module from rank 0, and `reduce` averages their gradients. `reduce` averages tensors in
            place.
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads: list[Tensor] = []
        if self.module is not None:
            sync_module_states(self.module, dist.group.WORLD, _BROADCAST_BYTES, 0)
        else:
            self.grads = list(_find_tensors(module_or_grads_list))

    def reduce(self) -> None:
        """Average the gradients of parameters, or the tensors. The same parameters must have gradients on every rank.

        Gradients of float32 masters are averaged, too, because at O2 and O5 a `scale_loss` block moves gradients from
        parameters to masters. From the first call on, amp skips the same steps on all ranks, because inf on one rank
        gives inf in the average. The first call also copies the loss scales of rank 0 to the other ranks.
        """
        params = [] if self.module is None else list(self.module.parameters())
        session = find_session()
        if session is not None:
            session.share_skips_with(dist.group.WORLD)
        masters = [] if session is None else [session.find_master(parameter) for parameter in params]
        holders = [*params, *(master for master in masters if master is not None)]
        flat_dist_call([*self.grads, *(holder.grad for holder in holders if holder.grad is not None)], dist.all_reduce)


def _find_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        for item in items:
            yield from _find_tensors(item)


# ---- calls on flattened tensors --------------------------------------------------------------------------------------


def split_by_type(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Return the tensors by `Tensor.type()`, such as "torch.FloatTensor", in order of appearance."""
    buckets: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault(tensor.type(), []).append(tensor)
    return buckets


def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Flatten `bucket`, tensors of one dtype and device, run `call(flat, *extra_args)`, and copy `flat` back to them.

    If `call` is `dist.all_reduce`, its result is divided by the number of ranks.
    """
    with torch.no_grad():
        flat = flatten(bucket)
        call(flat, *(extra_args or ()))
        # as in Apex, which averages only for this function
        if call is dist.all_reduce:
            flat /= dist.get_world_size()
        foreach_copy_(list(bucket), list(unflatten(flat, bucket)))


def flat_dist_call(
    tensors: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run `apply_flat_dist_call` once for each dtype and type of device among the tensors."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)
