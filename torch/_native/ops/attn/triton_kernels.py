"""The Triton kernels of attn and attn_output.

Two kernels serve all operators. `_rows` goes through the columns of attn for a block of its
rows, and makes what has a row for each query: output, its tangent, the gradient of q. `_columns`
goes through the rows for a block of columns, and makes the gradients of k and v. Neither shares
a sum with another program, so that the results have the same bits each time, without atomics.

With S = q kᵀ, P = tanh(scale S), or 0 where a query does not see a key, slope = 1 - P², G the
gradient of output, G_a that of attn, X' the tangent of X:

    output = P v                                      T = G vᵀ + G_a
    P' = scale slope ∘ (q' kᵀ + q k'ᵀ)                output' = P' v + P v'
    D = slope ∘ T                                     D' = slope ∘ (G v'ᵀ) - 2 P ∘ P' ∘ T
    grad_q = scale D k                                grad_q' = scale (D' k + D k')
    grad_k = scale Dᵀ q                               grad_k' = scale (D'ᵀ q + Dᵀ q')
    grad_v = Pᵀ G                                     grad_v' = P'ᵀ G

In the code a name with _t is a tangent, and D_t is D'. A matrix is a tuple: a pointer, the
strides of its rows and columns, the strides of its batch dimensions. None is a matrix that is
not there: what needs it is left out when the kernel is compiled.
"""

import triton
import triton.language as tl


# The largest relative error of each form, for all floats: see test_attn_triton_tanh.py.
#
#   "approx"   2^-11    one instruction of NVIDIA's; the bound is PTX's
#   "reduced"  2^-14.6  for results that are rounded to half or bfloat16
#   "float"    2.5 ULP, and what the quotient of two floats adds on a GPU
#
# The last two are those of ATen/native/cpu/AttnTanh.h, with its constants.
@triton.jit
def _tanh(x, FORM: tl.constexpr):
    """tanh(x) of floats. NaN stays NaN."""
    sign = x.to(tl.int32, bitcast=True) & -(2**31)
    if FORM == "approx":
        result = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    elif FORM == "reduced":
        # x p(x²) / q(x²), or 1 where that is as near: its slope is then 0, however large
        # the scale that it is multiplied with.
        u = x * x
        p = tl.fma(tl.fma(u, 26.0717049, 1908.06311), u, 16466.6973)
        q = tl.fma(tl.fma(u + 296.548828, u, 7396.62695), u, 16466.6973)
        one = (sign | 0x3F800000).to(tl.float32, bitcast=True)
        result = tl.where(tl.abs(x) >= 5.5, one, x * p / q)
    else:
        # tanh(n L + r) = (t B + A) / (t A + B), where L = log(2) / 2, t = tanh(r) =
        # r + r³ p(r²), A = (2^n - 1) / 2 and B = (2^n + 1) / 2
        a = tl.minimum(tl.abs(x), 9.2, propagate_nan=tl.PropagateNan.ALL)
        # A sum with it ends in the bits of an integer, plus the exponent of a half.
        ROUNDER: tl.constexpr = 12582912.0 + 126.0
        y = tl.fma(a, 2.88539004, ROUNDER)
        r = tl.fma(y - ROUNDER, -0.346573591, a)
        u = r * r
        p = tl.fma(tl.fma(u, -0.0527273044, 0.133311853), u, -0.333333224)
        t = tl.fma(r * u, p, r)
        power = (y.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
        A = power - 0.5
        B = power + 0.5
        result = tl.fma(t, B, A) / tl.fma(t, A, B)
        # The result has the sign of x.
        result = (result.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return result


@triton.jit
def _tile(x, sample, sizes, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to the tile of x that begins in this row and column of the sample."""
    zero = tl.full((), 0, tl.int64)
    start = (zero + row) * x[1] + (zero + column) * x[2]
    for i in tl.static_range(len(sizes)):
        start += (zero + sample % sizes[i]) * x[3][i]
        sample = sample // sizes[i]
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    return x[0] + start + (rows[:, None] * x[1] + columns[None, :] * x[2])


@triton.jit
def _inside(row, column, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Which elements of a tile lie inside an m x n matrix."""
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    return (rows < m)[:, None] & (columns < n)[None, :]


@triton.jit
def _load(
    x,
    sample,
    sizes,
    row,
    column,
    m,
    n,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_TAIL: tl.constexpr,
    COLUMN_TAIL: tl.constexpr,
):
    """A tile of x, with zeros beyond the last row and column, if it reaches there."""
    tile = _tile(x, sample, sizes, row, column, ROWS, COLUMNS)
    if ROW_TAIL or COLUMN_TAIL:
        inside = _inside(row, column, m, n, ROWS, COLUMNS)
        values = tl.load(tile, mask=inside, other=0.0)
    else:
        values = tl.load(tile)
    return values


@triton.jit
def _store(
    x,
    sample,
    sizes,
    row,
    m,
    n,
    value,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes rows of x."""
    tile = _tile(x, sample, sizes, row, 0, ROWS, COLUMNS)
    inside = _inside(row, 0, m, n, ROWS, COLUMNS)
    tl.store(tile, value.to(x[0].dtype.element_ty), mask=inside)


@triton.jit
def _dot_t(x, y, acc, PRECISION: tl.constexpr):
    """x yᵀ + acc; acc may be None."""
    return tl.dot(x, tl.trans(y), acc, input_precision=PRECISION)


@triton.jit
def _scores_tangent(x, y, x_t, y_t, PRECISION: tl.constexpr):
    """x' yᵀ + x y'ᵀ; one of x' and y' may be None."""
    if x_t is None:
        result = _dot_t(x, y_t, None, PRECISION)
    else:
        result = _dot_t(x_t, y, None, PRECISION)
        if y_t is not None:
            result = _dot_t(x, y_t, result, PRECISION)
    return result


@triton.jit
def _grad_attn(x, y, G_a, PRECISION: tl.constexpr):
    """x yᵀ + G_a; x or G_a may be None."""
    if x is not None:
        G_a = _dot_t(x, y, G_a, PRECISION)
    return G_a


@triton.jit
def _grad_scores(P, P_t, T, T_t):
    """D', where T_t is G v'ᵀ; D if both P_t and T_t are None."""
    slope = 1 - P * P
    if P_t is not None:
        result = -2 * P * P_t * T
        if T_t is not None:
            result += slope * T_t
    elif T_t is not None:
        result = slope * T_t
    else:
        result = slope * T
    return result


@triton.jit(do_not_specialize=["m", "n"])
def _rows(
    q,
    k,
    v,
    grad_output,
    grad_attn,
    q_tangent,
    k_tangent,
    v_tangent,
    stored,  # attn, which is read instead of made
    attn,  # from here on what is written
    output,
    output_tangent,
    grad_q,
    sizes,  # of the batch dimensions, the last one first
    m,
    n,
    scale,
    d: tl.constexpr,
    e: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROW_TAIL: tl.constexpr,  # Whether BM does not divide m, and BN not n.
    COLUMN_TAIL: tl.constexpr,
    TANH: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,  # A tile of attn is BM x BN.
    BN: tl.constexpr,
    D: tl.constexpr,  # These are d and e, rounded up to powers of two.
    E: tl.constexpr,
):
    S: tl.constexpr = k[0].dtype.element_ty
    blocks = tl.cdiv(m, BM)
    block = tl.program_id(0) % blocks
    sample = tl.program_id(0) // blocks
    if CAUSAL:
        block = blocks - 1 - block  # The longest come first.
    row = block * BM
    rows = row + tl.arange(0, BM)

    # What is None is not loaded.
    OF_D: tl.constexpr = d != D
    OF_E: tl.constexpr = e != E
    HAS_P_T: tl.constexpr = q_tangent is not None or k_tangent is not None
    if q is not None:
        q_tile = _load(q, sample, sizes, row, 0, m, d, BM, D, ROW_TAIL, OF_D)
    G = (
        _load(grad_output, sample, sizes, row, 0, m, e, BM, E, ROW_TAIL, OF_E)
        if grad_output is not None
        else None
    )
    q_t = (
        _load(q_tangent, sample, sizes, row, 0, m, d, BM, D, ROW_TAIL, OF_D)
        if q_tangent is not None
        else None
    )
    if output is not None:
        output_acc = tl.zeros((BM, E), tl.float32)
    if output_tangent is not None:
        output_t_acc = tl.zeros((BM, E), tl.float32)
    if grad_q is not None:
        grad_acc = tl.zeros((BM, D), tl.float32)

    # First the columns that need no mask, then those at the diagonal and beyond the last one.
    end = n
    whole = n // BN * BN
    if CAUSAL:
        end = tl.minimum(n, row + BM)
        whole = tl.minimum(whole, row // BN * BN)
    for masked in tl.static_range(2):
        if not masked or CAUSAL or COLUMN_TAIL:
            for column in range(whole if masked else 0, end if masked else whole, BN):
                k_tile = _load(
                    k,
                    sample,
                    sizes,
                    column,
                    0,
                    n,
                    d,
                    BN,
                    D,
                    masked and COLUMN_TAIL,
                    OF_D,
                )
                v_tile = (
                    _load(
                        v,
                        sample,
                        sizes,
                        column,
                        0,
                        n,
                        e,
                        BN,
                        E,
                        masked and COLUMN_TAIL,
                        OF_E,
                    )
                    if v is not None
                    else None
                )
                k_t = (
                    _load(
                        k_tangent,
                        sample,
                        sizes,
                        column,
                        0,
                        n,
                        d,
                        BN,
                        D,
                        masked and COLUMN_TAIL,
                        OF_D,
                    )
                    if k_tangent is not None
                    else None
                )
                v_t = (
                    _load(
                        v_tangent,
                        sample,
                        sizes,
                        column,
                        0,
                        n,
                        e,
                        BN,
                        E,
                        masked and COLUMN_TAIL,
                        OF_E,
                    )
                    if v_tangent is not None
                    else None
                )
                # Elements beyond the last column are zeros, but 0 times infinity is NaN.
                columns = (column + tl.arange(0, BN))[None, :]
                visible = rows[:, None] >= columns if CAUSAL else columns < n
                if CAUSAL and COLUMN_TAIL:
                    visible = visible & (columns < n)

                if stored is not None:
                    P = _load(
                        stored,
                        sample,
                        sizes,
                        row,
                        column,
                        m,
                        n,
                        BM,
                        BN,
                        ROW_TAIL,
                        masked and COLUMN_TAIL,
                    ).to(tl.float32)
                else:
                    P = _tanh(_dot_t(q_tile, k_tile, None, PRECISION) * scale, TANH)
                if masked and stored is None:
                    P = tl.where(visible, P, 0.0)
                if attn is not None:
                    tile = _tile(attn, sample, sizes, row, column, BM, BN)
                    if ROW_TAIL or (masked and COLUMN_TAIL):
                        inside = _inside(row, column, m, n, BM, BN)
                        tl.store(tile, P.to(S), mask=inside, cache_modifier=".cs")
                    else:
                        tl.store(tile, P.to(S), cache_modifier=".cs")
                if output is not None:
                    output_acc = tl.dot(
                        P.to(S), v_tile, output_acc, input_precision=PRECISION
                    )

                if HAS_P_T:
                    P_t = _scores_tangent(q_tile, k_tile, q_t, k_t, PRECISION)
                    P_t *= scale * (1 - P * P)
                    if masked:
                        P_t = tl.where(visible, P_t, 0.0)
                if output_tangent is not None:
                    if HAS_P_T:
                        output_t_acc = tl.dot(
                            P_t.to(S), v_tile, output_t_acc, input_precision=PRECISION
                        )
                    if v_tangent is not None:
                        output_t_acc = tl.dot(
                            P.to(S), v_t, output_t_acc, input_precision=PRECISION
                        )

                if grad_q is not None:
                    G_a = (
                        _load(
                            grad_attn,
                            sample,
                            sizes,
                            row,
                            column,
                            m,
                            n,
                            BM,
                            BN,
                            ROW_TAIL,
                            masked and COLUMN_TAIL,
                        ).to(tl.float32)
                        if grad_attn is not None
                        else None
                    )
                    T = _grad_attn(G, v_tile, G_a, PRECISION)
                    T_t = (
                        _dot_t(G, v_t, None, PRECISION)
                        if v_tangent is not None
                        else None
                    )
                    D_t = _grad_scores(P, P_t if HAS_P_T else None, T, T_t)
                    if masked:
                        D_t = tl.where(visible, D_t, 0.0)
                    grad_acc = tl.dot(
                        D_t.to(S), k_tile, grad_acc, input_precision=PRECISION
                    )
                    if k_tangent is not None:
                        D_0 = _grad_scores(P, None, T, None)
                        if masked:
                            D_0 = tl.where(visible, D_0, 0.0)
                        grad_acc = tl.dot(
                            D_0.to(S), k_t, grad_acc, input_precision=PRECISION
                        )

    if output is not None:
        _store(output, sample, sizes, row, m, e, output_acc, BM, E)
    if output_tangent is not None:
        _store(output_tangent, sample, sizes, row, m, e, output_t_acc, BM, E)
    if grad_q is not None:
        _store(grad_q, sample, sizes, row, m, d, grad_acc * scale, BM, D)


@triton.jit(do_not_specialize=["m", "n"])
def _columns(
    q,
    k,
    v,
    grad_output,
    grad_attn,
    q_tangent,
    k_tangent,
    v_tangent,
    stored,
    grad_k,  # from here on what is written
    grad_v,
    sizes,
    k_sizes,  # of the batch dimensions of k and v
    sharing,  # how many samples of q share those of k and v
    m,
    n,
    scale,
    d: tl.constexpr,
    e: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROW_TAIL: tl.constexpr,
    COLUMN_TAIL: tl.constexpr,
    TANH: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    S: tl.constexpr = (
        q[0].dtype.element_ty if q is not None else grad_output[0].dtype.element_ty
    )
    blocks = tl.cdiv(n, BN)
    column = tl.program_id(0) % blocks * BN
    sample = tl.program_id(0) // blocks
    columns = column + tl.arange(0, BN)

    OF_D: tl.constexpr = d != D
    OF_E: tl.constexpr = e != E
    HAS_P_T: tl.constexpr = q_tangent is not None or k_tangent is not None
    if k is not None:
        k_tile = _load(k, sample, k_sizes, column, 0, n, d, BN, D, COLUMN_TAIL, OF_D)
    v_tile = (
        _load(v, sample, k_sizes, column, 0, n, e, BN, E, COLUMN_TAIL, OF_E)
        if v is not None
        else None
    )
    k_t = (
        _load(k_tangent, sample, k_sizes, column, 0, n, d, BN, D, COLUMN_TAIL, OF_D)
        if k_tangent is not None
        else None
    )
    if v_tangent is not None:
        v_t = _load(
            v_tangent, sample, k_sizes, column, 0, n, e, BN, E, COLUMN_TAIL, OF_E
        )
    if grad_k is not None:
        grad_k_acc = tl.zeros((BN, D), tl.float32)
    if grad_v is not None:
        grad_v_acc = tl.zeros((BN, E), tl.float32)

    # The rows from `whole` to `tail` need no mask. Those before are at the diagonal, and none
    # is before `begin`.
    begin = 0
    whole = 0
    tail = m // BM * BM
    if CAUSAL:
        begin = column // BM * BM
        whole = tl.minimum(tl.cdiv(column + BN - 1, BM) * BM, tail)
    # The samples of q that share a sample of k lie in the last of the sizes.
    for member in range(sharing):
        of_q = sample * sharing + member
        for masked in tl.static_range(2):
            if not masked or CAUSAL or ROW_TAIL:
                for place in range(
                    begin if masked else whole,
                    m - (tail - whole) if masked else tail,
                    BM,
                ):
                    row = place
                    if masked:
                        row = tl.where(place < whole, place, place + (tail - whole))
                    if q is not None:
                        q_tile = _load(
                            q,
                            of_q,
                            sizes,
                            row,
                            0,
                            m,
                            d,
                            BM,
                            D,
                            masked and ROW_TAIL,
                            OF_D,
                        )
                    G = (
                        _load(
                            grad_output,
                            of_q,
                            sizes,
                            row,
                            0,
                            m,
                            e,
                            BM,
                            E,
                            masked and ROW_TAIL,
                            OF_E,
                        )
                        if grad_output is not None
                        else None
                    )
                    q_t = (
                        _load(
                            q_tangent,
                            of_q,
                            sizes,
                            row,
                            0,
                            m,
                            d,
                            BM,
                            D,
                            masked and ROW_TAIL,
                            OF_D,
                        )
                        if q_tangent is not None
                        else None
                    )
                    rows = (row + tl.arange(0, BM))[None, :]
                    visible = rows >= columns[:, None] if CAUSAL else rows < m
                    if CAUSAL and ROW_TAIL:
                        visible = visible & (rows < m)

                    # All tiles are transposed: their rows are columns of attn.
                    if stored is not None:
                        P = _load(
                            stored,
                            of_q,
                            sizes,
                            row,
                            column,
                            m,
                            n,
                            BM,
                            BN,
                            masked and ROW_TAIL,
                            COLUMN_TAIL,
                        )
                        P = tl.trans(P).to(tl.float32)
                    else:
                        P = _tanh(_dot_t(k_tile, q_tile, None, PRECISION) * scale, TANH)
                    if masked and stored is None:
                        P = tl.where(visible, P, 0.0)
                    if HAS_P_T:
                        P_t = _scores_tangent(k_tile, q_tile, k_t, q_t, PRECISION)
                        P_t *= scale * (1 - P * P)
                        if masked:
                            P_t = tl.where(visible, P_t, 0.0)

                    if grad_v is not None:
                        weights = P_t if HAS_P_T else P
                        grad_v_acc = tl.dot(
                            weights.to(S), G, grad_v_acc, input_precision=PRECISION
                        )
                    if grad_k is not None:
                        G_a = (
                            tl.trans(
                                _load(
                                    grad_attn,
                                    of_q,
                                    sizes,
                                    row,
                                    column,
                                    m,
                                    n,
                                    BM,
                                    BN,
                                    masked and ROW_TAIL,
                                    COLUMN_TAIL,
                                )
                            ).to(tl.float32)
                            if grad_attn is not None
                            else None
                        )
                        T = _grad_attn(v_tile, G, G_a, PRECISION)
                        T_t = (
                            _dot_t(v_t, G, None, PRECISION)
                            if v_tangent is not None
                            else None
                        )
                        D_t = _grad_scores(P, P_t if HAS_P_T else None, T, T_t)
                        if masked:
                            D_t = tl.where(visible, D_t, 0.0)
                        grad_k_acc = tl.dot(
                            D_t.to(S), q_tile, grad_k_acc, input_precision=PRECISION
                        )
                        if q_tangent is not None:
                            D_0 = _grad_scores(P, None, T, None)
                            if masked:
                                D_0 = tl.where(visible, D_0, 0.0)
                            grad_k_acc = tl.dot(
                                D_0.to(S), q_t, grad_k_acc, input_precision=PRECISION
                            )

    if grad_k is not None:
        _store(grad_k, sample, k_sizes, column, n, d, grad_k_acc * scale, BN, D)
    if grad_v is not None:
        _store(grad_v, sample, k_sizes, column, n, e, grad_v_acc, BN, E)
