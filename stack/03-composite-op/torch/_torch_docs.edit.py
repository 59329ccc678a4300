# @@ after: torch.histogramdd.__module__ = "torch"

add_docstr(
    torch.attn,
    r"""
attn(q, k, v) -> (Tensor, Tensor)

Attention whose scores pass through a hyperbolic tangent instead of a softmax:

.. math::
    \text{attn} = \tanh(q k^\top), \qquad \text{output} = \text{attn} \, v

Returns a namedtuple ``(output, attn)``. Both are differentiable; see :doc:`/notes/attn` for the
derivation of the gradients.

Args:
    q (Tensor): the queries, of shape :math:`(*, m, d)`.
    k (Tensor): the keys, of shape :math:`(*, n, d)`.
    v (Tensor): the values, of shape :math:`(*, n, e)`.

Here :math:`*` is zero or more batch dimensions. They are the same for all three: there is no broadcasting,
but an operand that the samples share can be passed expanded. All three have the same floating point or
complex dtype and are on the same device. Sparse ones are taken where :func:`torch.matmul` takes them. The
scores are neither scaled nor, for complex inputs, conjugated.

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
