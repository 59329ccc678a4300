# @@ after: torch.histogramdd.__module__ = "torch"

add_docstr(
    torch.attn,
    r"""
attn(q, k, v) -> (Tensor, Tensor)

Attention whose scores pass through a hyperbolic tangent instead of a softmax:

.. math::
    \text{attn} = \tanh(q k^\top), \qquad \text{output} = \text{attn} \, v

Returns a namedtuple ``(output, attn)``. Both are differentiable, any number of times, in reverse and in forward
mode; see :doc:`/notes/attn` for the formulas.

Args:
    q (Tensor): the queries, of shape :math:`(*, m, d)`.
    k (Tensor): the keys, of shape :math:`(*, n, d)`.
    v (Tensor): the values, of shape :math:`(*, n, e)`.

Here :math:`*` is zero or more batch dimensions. They are the same for all three: there is no broadcasting,
but an operand that the samples share can be passed expanded. All three have the same floating point or
complex dtype and are on the same device. Sparse ones are taken where :func:`torch.matmul` takes them. The
scores are neither scaled nor, for complex inputs, conjugated.

Autocast runs it in the lower precision. The forward takes :math:`2mn(d + e)` FLOPs for each sample, the backward
twice as many; ``attn`` is kept for it. How much other memory they take, and the order of their sums, depend on
the device: see :doc:`/notes/attn_operator`.

Returns:
    A namedtuple of ``output`` with shape :math:`(*, m, e)` and ``attn`` with shape
    :math:`(*, m, n)`, both contiguous and of the dtype of the inputs.

Raises:
    RuntimeError: if an input has fewer than two dimensions or is an mkldnn tensor, if the batch dimensions, the sizes
        :math:`d` of ``q`` and ``k`` or :math:`n` of ``k`` and ``v`` differ, if the dtypes or the
        devices differ, or if the dtype is integral or bool.

Example::

    >>> q, k, v = torch.randn(2, 3), torch.randn(5, 3), torch.randn(5, 4)
    >>> output, attn = torch.attn(q, k, v)
    >>> output.shape, attn.shape
    (torch.Size([2, 4]), torch.Size([2, 5]))
""",
)

add_docstr(
    torch.attn_output,
    r"""
attn_output(q, k, v, *, is_causal=False, scale=1.0) -> Tensor

The output of :func:`torch.attn` alone, for sequences of any length:

.. math::
    \text{attn} = \tanh(\text{scale} \cdot q k^\top), \qquad \text{output} = \text{attn} \, v

On a CPU the :math:`m \times n` matrix exists only as tiles: memory grows with :math:`m + n`. The backward keeps
:attr:`q`, :attr:`k` and :attr:`v`, and makes the tiles again; so do forward mode, second and third derivatives. Inputs that
are complex, on another device or have more than 1024 columns, and fourth derivatives, take the whole matrix: the
operator is then composed of :func:`torch.matmul` and :func:`torch.tanh`.

Args:
    q (Tensor): the queries, of shape :math:`(*, m, d)`.
    k (Tensor): the keys, of shape :math:`(*, n, d)`.
    v (Tensor): the values, of shape :math:`(*, n, e)`.

Here :math:`*` is zero or more batch dimensions. Those of :attr:`k` and :attr:`v` are the same, and each is that of
:attr:`q` or 1. So heads in groups are :attr:`q` of shape :math:`(b, h, g, m, d)` with :attr:`k` and :attr:`v` of shape
:math:`(b, h, 1, n, \cdot)`, of which nothing is copied. Dtypes and devices are as for :func:`torch.attn`.

Keyword args:
    is_causal (bool): whether query :math:`i` sees keys :math:`j \le i` alone: ``attn`` is 0 elsewhere, after the
        hyperbolic tangent. For :math:`m \ne n` too the first query sees the first key, as in
        :func:`~torch.nn.functional.scaled_dot_product_attention`. Default: ``False``
    scale (float): by what the scores are multiplied. Default: ``1.0``, unlike
        :func:`~torch.nn.functional.scaled_dot_product_attention`, which divides by :math:`\sqrt d`

On a CPU, for real inputs of at most 1024 columns, the result and its first three derivatives have the same bits
for any number of threads, any batch and any strides. Elsewhere that depends on :func:`torch.matmul`.

If :attr:`is_causal`, keys after the last query may hold anything. Of the others, an infinity or a NaN reaches only
queries that see it, and only their results, on a CPU. Where the whole matrix is taken, it reaches other queries too,
because 0 times NaN is NaN, as where :func:`~torch.nn.functional.scaled_dot_product_attention` is composed.

Returns:
    ``output`` with shape :math:`(*, m, e)`, contiguous and of the dtype of the inputs.

Raises:
    RuntimeError: as :func:`torch.attn` does, but for batch dimensions that are 1 in :attr:`k` and :attr:`v`.

Example::

    >>> q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 1, 5, 6)
    >>> torch.attn_output(q, k, v, is_causal=True).shape
    torch.Size([2, 4, 3, 6])
""",
)
