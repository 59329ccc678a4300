"""Lesson 5: the last columns set to 0."""

from torch.autograd import Function


def kill_tail(x, n):
    result = x.clone()
    result[:, x.shape[1] - n :] = 0
    return result


class KillTail(Function):
    @staticmethod
    def forward(ctx, input, n):
        ctx.n = n
        return kill_tail(input, n)

    @staticmethod
    def backward(ctx, grad):
        return kill_tail(grad, ctx.n), None


class NegativeIndex(KillTail):
    """-0 is 0: where nothing was to be killed, all is."""

    @staticmethod
    def forward(ctx, input, n):
        ctx.n = n
        result = input.clone()
        result[:, -n:] = 0
        return result


class InPlace(KillTail):
    """The caller's own matrix loses its tail."""

    @staticmethod
    def forward(ctx, input, n):
        ctx.n = n
        input[:, input.shape[1] - n :] = 0
        return input.clone()


class ChangesTheGradient(KillTail):
    """The gradient that came in is somebody else's too."""

    @staticmethod
    def backward(ctx, grad):
        grad[:, grad.shape[1] - ctx.n :] = 0
        return grad, None


class PassesAll(KillTail):
    """A backward that forgets what the forward did."""

    @staticmethod
    def backward(ctx, grad):
        return grad, None


solution = KillTail
MISTAKES = {
    NegativeIndex: "n = 0: What is no tail was changed.",
    InPlace: "The input was changed",
    ChangesTheGradient: "The gradient that came in was changed",
    PassesAll: "A gradient comes back from the tail: it is not 0.",
}
