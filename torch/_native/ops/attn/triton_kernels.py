"""The Triton kernels of attn and attn_output.

Three kernels serve all operators. `_attn_rows` goes through the columns of attn for a block of its
rows, and makes what has a row for each query: output, its tangent, the gradient of q.
`_attn_columns` goes through the rows for a block of columns, and makes the gradients of k and v.
`_attn_third_order` does either for attn_output's third order. None shares a sum with another
program, so that the results have the same bits each time, without atomics.

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
not there: what needs it is left out when the kernel is compiled. A sample is a tuple, too: its
number, and the sizes of the batch dimensions, the last one first.
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
def _tile(x, sample, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to the tile of x that begins in this row and column of the sample."""
    number, sizes = sample
    zero = tl.full((), 0, tl.int64)
    start = (zero + row) * x[1] + (zero + column) * x[2]
    for i in tl.static_range(len(sizes)):
        start += (zero + number % sizes[i]) * x[3][i]
        number = number // sizes[i]
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    return x[0] + start + (rows[:, None] * x[1] + columns[None, :] * x[2])


@triton.jit
def _inside(
    row,
    column,
    m,
    n,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    M_TAIL: tl.constexpr,
    N_TAIL: tl.constexpr,
):
    """Which elements of a tile lie inside an m x n matrix that may end in these directions.

    A direction that is not asked about keeps loads and stores as wide as they are.
    """
    inside = tl.full((1, 1), True, tl.int1)
    if M_TAIL:
        inside = inside & (row + tl.arange(0, ROWS) < m)[:, None]
    if N_TAIL:
        inside = inside & (column + tl.arange(0, COLUMNS) < n)[None, :]
    return inside


@triton.jit
def _load(
    x,
    sample,
    row,
    column,
    m,
    n,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    M_TAIL: tl.constexpr,
    N_TAIL: tl.constexpr,
):
    """A tile of an m x n matrix, with zeros beyond it, where the tile may reach that far.

    None of None.
    """
    if x is None:
        tile = None
    elif M_TAIL or N_TAIL:
        inside = _inside(row, column, m, n, ROWS, COLUMNS, M_TAIL, N_TAIL)
        pointers = _tile(x, sample, row, column, ROWS, COLUMNS)
        tile = tl.load(pointers, mask=inside, other=0.0)
    else:
        tile = tl.load(_tile(x, sample, row, column, ROWS, COLUMNS))
    return tile


@triton.jit
def _store(
    x,
    sample,
    row,
    m,
    n,
    tile,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    N_TAIL: tl.constexpr,
):
    """Writes rows of an m x n matrix."""
    inside = _inside(row, 0, m, n, ROWS, COLUMNS, True, N_TAIL)
    pointers = _tile(x, sample, row, 0, ROWS, COLUMNS)
    tl.store(pointers, tile.to(x[0].dtype.element_ty), mask=inside)


@triton.jit
def _dot_t(x, y, acc, PRECISION: tl.constexpr):
    """x yᵀ + acc; acc may be None."""
    return tl.dot(x, tl.trans(y), acc, input_precision=PRECISION)


@triton.jit
def _attn_tangent(
    P,
    x,
    y,
    x_t,
    y_t,
    scale,
    X_T: tl.constexpr,
    Y_T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """P' = scale slope ∘ (x' yᵀ + x y'ᵀ), where X_T and Y_T say which tangents there are."""
    if X_T:
        P_t = _dot_t(x_t, y, None, PRECISION)
        if Y_T:
            P_t = _dot_t(x, y_t, P_t, PRECISION)
    else:
        P_t = _dot_t(x, y_t, None, PRECISION)
    return P_t * (scale * (1 - P * P))


@triton.jit
def _grad_scores(P, P_t, T, T_t, HAS_P_T: tl.constexpr, HAS_T_T: tl.constexpr):
    """D', where T_t is G v'ᵀ; D if there is neither P' nor T'."""
    slope = 1 - P * P
    if HAS_P_T:
        result = -2 * P * P_t * T
        if HAS_T_T:
            result += slope * T_t
    elif HAS_T_T:
        result = slope * T_t
    else:
        result = slope * T
    return result


# A kernel is compiled once more for an n that 16 divides: rows of attn can then be read by wide
# loads although they are masked.
@triton.jit(do_not_specialize=["m"])
def _attn_rows(
    q,
    k,
    v,
    grad_output,
    grad_attn,
    q_tangent,
    k_tangent,
    v_tangent,
    stored,  # attn, which is read instead of made
    attn,  # From here on matrices are written.
    output,
    output_tangent,
    grad_q,
    sizes,
    m,
    n,
    d,
    e,
    scale,
    CAUSAL: tl.constexpr,
    M_TAIL: tl.constexpr,  # whether BM does not divide m; BN n; D is not d; E not e
    N_TAIL: tl.constexpr,
    D_TAIL: tl.constexpr,
    E_TAIL: tl.constexpr,
    TANH: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,  # A tile of attn is BM x BN.
    BN: tl.constexpr,
    D: tl.constexpr,  # d and e, rounded up to powers of two
    E: tl.constexpr,
):
    S: tl.constexpr = k[0].dtype.element_ty
    Q_T: tl.constexpr = q_tangent is not None
    K_T: tl.constexpr = k_tangent is not None
    V_T: tl.constexpr = v_tangent is not None
    blocks = tl.cdiv(m, BM)
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # The longest come first.
    row = block * BM
    rows = row + tl.arange(0, BM)
    at = (tl.program_id(0) // blocks, sizes)

    q_tile = _load(q, at, row, 0, m, d, BM, D, M_TAIL, D_TAIL)
    G = _load(grad_output, at, row, 0, m, e, BM, E, M_TAIL, E_TAIL)
    q_t = _load(q_tangent, at, row, 0, m, d, BM, D, M_TAIL, D_TAIL)
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
        if not masked or CAUSAL or N_TAIL:
            for column in range(whole if masked else 0, end if masked else whole, BN):
                k_tile = _load(k, at, column, 0, n, d, BN, D, masked and N_TAIL, D_TAIL)
                v_tile = _load(v, at, column, 0, n, e, BN, E, masked and N_TAIL, E_TAIL)
                k_t = _load(
                    k_tangent, at, column, 0, n, d, BN, D, masked and N_TAIL, D_TAIL
                )
                v_t = _load(
                    v_tangent, at, column, 0, n, e, BN, E, masked and N_TAIL, E_TAIL
                )
                # Elements beyond the last column are zeros, but 0 times infinity is NaN.
                columns = (column + tl.arange(0, BN))[None, :]
                visible = columns < n
                if CAUSAL:
                    visible = visible & (rows[:, None] >= columns)

                if stored is not None:
                    P = _load(
                        stored, at, row, column, m, n, BM, BN, M_TAIL, masked and N_TAIL
                    ).to(tl.float32)
                else:
                    P = _tanh(_dot_t(q_tile, k_tile, None, PRECISION) * scale, TANH)
                if masked and stored is None:
                    P = tl.where(visible, P, 0.0)
                if attn is not None:
                    tile = _tile(attn, at, row, column, BM, BN)
                    if M_TAIL or (masked and N_TAIL):
                        inside = _inside(
                            row, column, m, n, BM, BN, M_TAIL, masked and N_TAIL
                        )
                        tl.store(tile, P.to(S), mask=inside, cache_modifier=".cs")
                    else:
                        tl.store(tile, P.to(S), cache_modifier=".cs")
                if output is not None:
                    output_acc = tl.dot(
                        P.to(S), v_tile, output_acc, input_precision=PRECISION
                    )

                P_t = 0.0
                if Q_T or K_T:
                    P_t = _attn_tangent(
                        P, q_tile, k_tile, q_t, k_t, scale, Q_T, K_T, PRECISION
                    )
                    if masked:
                        P_t = tl.where(visible, P_t, 0.0)
                if output_tangent is not None:
                    if Q_T or K_T:
                        output_t_acc = tl.dot(
                            P_t.to(S), v_tile, output_t_acc, input_precision=PRECISION
                        )
                    if V_T:
                        output_t_acc = tl.dot(
                            P.to(S), v_t, output_t_acc, input_precision=PRECISION
                        )

                if grad_q is not None:
                    T = _load(
                        grad_attn,
                        at,
                        row,
                        column,
                        m,
                        n,
                        BM,
                        BN,
                        M_TAIL,
                        masked and N_TAIL,
                    )
                    if grad_attn is not None:
                        T = T.to(tl.float32)
                        if grad_output is not None:
                            T = _dot_t(G, v_tile, T, PRECISION)
                    else:
                        T = _dot_t(G, v_tile, None, PRECISION)
                    T_t = _dot_t(G, v_t, None, PRECISION) if V_T else 0.0
                    D_t = _grad_scores(P, P_t, T, T_t, Q_T or K_T, V_T)
                    if masked:
                        D_t = tl.where(visible, D_t, 0.0)
                    grad_acc = tl.dot(
                        D_t.to(S), k_tile, grad_acc, input_precision=PRECISION
                    )
                    if K_T:
                        D_0 = _grad_scores(P, P_t, T, T_t, False, False)
                        if masked:
                            D_0 = tl.where(visible, D_0, 0.0)
                        grad_acc = tl.dot(
                            D_0.to(S), k_t, grad_acc, input_precision=PRECISION
                        )

    if output is not None:
        _store(output, at, row, m, e, output_acc, BM, E, E_TAIL)
    if output_tangent is not None:
        _store(output_tangent, at, row, m, e, output_t_acc, BM, E, E_TAIL)
    if grad_q is not None:
        _store(grad_q, at, row, m, d, grad_acc * scale, BM, D, D_TAIL)


@triton.jit(do_not_specialize=["m"])
def _attn_columns(
    q,
    k,
    v,
    grad_output,
    grad_attn,
    q_tangent,
    k_tangent,
    v_tangent,
    stored,
    grad_k,  # From here on matrices are written.
    grad_v,
    sizes,
    k_sizes,  # of the batch dimensions of k and v
    sharing,  # how many samples of q share one of k and v
    m,
    n,
    d,
    e,
    scale,
    CAUSAL: tl.constexpr,
    M_TAIL: tl.constexpr,
    N_TAIL: tl.constexpr,
    D_TAIL: tl.constexpr,
    E_TAIL: tl.constexpr,
    TANH: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    S: tl.constexpr = (
        stored[0].dtype.element_ty if stored is not None else q[0].dtype.element_ty
    )
    Q_T: tl.constexpr = q_tangent is not None
    K_T: tl.constexpr = k_tangent is not None
    V_T: tl.constexpr = v_tangent is not None
    blocks = tl.cdiv(n, BN)
    column = tl.program_id(0) % blocks * BN
    columns = column + tl.arange(0, BN)
    k_at = (tl.program_id(0) // blocks, k_sizes)

    k_tile = _load(k, k_at, column, 0, n, d, BN, D, N_TAIL, D_TAIL)
    v_tile = _load(v, k_at, column, 0, n, e, BN, E, N_TAIL, E_TAIL)
    k_t = _load(k_tangent, k_at, column, 0, n, d, BN, D, N_TAIL, D_TAIL)
    v_t = _load(v_tangent, k_at, column, 0, n, e, BN, E, N_TAIL, E_TAIL)
    if grad_k is not None:
        grad_k_acc = tl.zeros((BN, D), tl.float32)
    if grad_v is not None:
        grad_v_acc = tl.zeros((BN, E), tl.float32)

    # The rows from `whole` to `tail` need no mask. Those before are at the diagonal; none before
    # `begin` sees a column.
    begin = 0
    whole = 0
    tail = m // BM * BM
    if CAUSAL:
        begin = column // BM * BM
        whole = tl.minimum(tl.cdiv(column + BN - 1, BM) * BM, tail)
    # Samples of q that share one of k follow each other.
    for member in range(sharing):
        at = (k_at[0] * sharing + member, sizes)
        for masked in tl.static_range(2):
            if not masked or CAUSAL or M_TAIL:
                # The few masked tiles are not pipelined: what that takes would spill registers.
                for place in tl.range(
                    begin if masked else whole,
                    m - (tail - whole) if masked else tail,
                    BM,
                    num_stages=1 if masked else None,
                ):
                    row = place
                    if masked:
                        row = tl.where(place < whole, place, place + (tail - whole))
                    q_tile = _load(
                        q, at, row, 0, m, d, BM, D, masked and M_TAIL, D_TAIL
                    )
                    G = _load(
                        grad_output, at, row, 0, m, e, BM, E, masked and M_TAIL, E_TAIL
                    )
                    q_t = _load(
                        q_tangent, at, row, 0, m, d, BM, D, masked and M_TAIL, D_TAIL
                    )
                    rows = (row + tl.arange(0, BM))[None, :]
                    visible = rows < m
                    if CAUSAL:
                        visible = visible & (rows >= columns[:, None])

                    # All tiles are transposed: their rows are columns of attn.
                    if stored is not None:
                        P = _load(
                            stored,
                            at,
                            row,
                            column,
                            m,
                            n,
                            BM,
                            BN,
                            masked and M_TAIL,
                            N_TAIL,
                        )
                        P = tl.trans(P).to(tl.float32)
                    else:
                        P = _tanh(_dot_t(k_tile, q_tile, None, PRECISION) * scale, TANH)
                    if masked and stored is None:
                        P = tl.where(visible, P, 0.0)
                    P_t = 0.0
                    if Q_T or K_T:
                        P_t = _attn_tangent(
                            P, k_tile, q_tile, k_t, q_t, scale, K_T, Q_T, PRECISION
                        )
                        if masked:
                            P_t = tl.where(visible, P_t, 0.0)

                    if grad_v is not None:
                        weights = P_t if Q_T or K_T else P
                        grad_v_acc = tl.dot(
                            weights.to(S), G, grad_v_acc, input_precision=PRECISION
                        )
                    if grad_k is not None:
                        T = _load(
                            grad_attn,
                            at,
                            row,
                            column,
                            m,
                            n,
                            BM,
                            BN,
                            masked and M_TAIL,
                            N_TAIL,
                        )
                        if grad_attn is not None:
                            T = tl.trans(T).to(tl.float32)
                            if grad_output is not None:
                                T = _dot_t(v_tile, G, T, PRECISION)
                        else:
                            T = _dot_t(v_tile, G, None, PRECISION)
                        T_t = _dot_t(v_t, G, None, PRECISION) if V_T else 0.0
                        D_t = _grad_scores(P, P_t, T, T_t, Q_T or K_T, V_T)
                        if masked:
                            D_t = tl.where(visible, D_t, 0.0)
                        grad_k_acc = tl.dot(
                            D_t.to(S), q_tile, grad_k_acc, input_precision=PRECISION
                        )
                        if Q_T:
                            D_0 = _grad_scores(P, P_t, T, T_t, False, False)
                            if masked:
                                D_0 = tl.where(visible, D_0, 0.0)
                            grad_k_acc = tl.dot(
                                D_0.to(S), q_t, grad_k_acc, input_precision=PRECISION
                            )

    if grad_k is not None:
        _store(grad_k, k_at, column, n, d, grad_k_acc * scale, BN, D, D_TAIL)
    if grad_v is not None:
        _store(grad_v, k_at, column, n, e, grad_v_acc, BN, E, E_TAIL)


# The third order has derivatives along u and w of A v, D k, Dᵀ q and Aᵀ G, with
#
#     X = q kᵀ    A = tanh(scale X)    slope = scale (1 - A²)    T = G vᵀ    D = slope ∘ T
#
# or 0 each where a query does not see a key. q, k, v and G are linear along a direction: they have
# no derivative along both. That of a product is a sum of products, and along one direction
#
#     A_u = slope ∘ X_u    slope_u = -2 scale A ∘ A_u
#
# In the following functions None is zero. It is left out when the kernel is compiled.
@triton.jit
def _plus(x, y):
    """x + y"""
    if x is None:
        result = y
    elif y is None:
        result = x
    else:
        result = x + y
    return result


@triton.jit
def _times(x, y):
    """x ∘ y"""
    if x is None:
        result = x
    elif y is None:
        result = y
    else:
        result = x * y
    return result


@triton.jit
def _plus_scores(acc, x, y, OF_ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x yᵀ; acc + y xᵀ unless OF_ROWS"""
    if x is None or y is None:
        result = acc
    elif OF_ROWS:
        result = _dot_t(x, y, acc, PRECISION)
    else:
        result = _dot_t(y, x, acc, PRECISION)
    return result


@triton.jit
def _plus_product(acc, tile, x, visible, PRECISION: tl.constexpr):
    """acc + tile x, where what is not visible of the tile is 0"""
    if tile is None or x is None:
        result = acc
    else:
        kept = tl.where(visible, tile, 0.0).to(x.dtype)
        result = tl.dot(kept, x, acc, input_precision=PRECISION)
    return result


@triton.jit(do_not_specialize=["m"])
def _attn_third_order(
    q,
    k,
    v,
    grad_output,
    u_q,
    u_k,
    u_v,
    w_grad_output,
    w_q,
    w_k,
    w_v,
    output_tangent,  # From here on matrices are written: either the first two
    grad_q,
    grad_k,  # or the last two.
    grad_v,
    sizes,
    k_sizes,
    sharing,
    m,
    n,
    d,
    e,
    scale,
    CAUSAL: tl.constexpr,
    M_TAIL: tl.constexpr,
    N_TAIL: tl.constexpr,
    D_TAIL: tl.constexpr,
    E_TAIL: tl.constexpr,
    TANH: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    OF_ROWS: tl.constexpr = output_tangent is not None or grad_q is not None
    OF_OUTPUT: tl.constexpr = output_tangent is not None or grad_v is not None
    OF_SCORES: tl.constexpr = grad_q is not None or grad_k is not None
    LENGTH: tl.constexpr = BM if OF_ROWS else BN
    STEP: tl.constexpr = BN if OF_ROWS else BM
    blocks = tl.cdiv(m if OF_ROWS else n, LENGTH)
    block = tl.program_id(0) % blocks
    sample = tl.program_id(0) // blocks
    begin = 0
    if OF_ROWS:
        if CAUSAL:
            block = blocks - 1 - block  # The longest come first.
        row = block * BM
        at = (sample, sizes)
        q_0 = _load(q, at, row, 0, m, d, BM, D, M_TAIL, D_TAIL)
        q_u = _load(u_q, at, row, 0, m, d, BM, D, M_TAIL, D_TAIL)
        q_w = _load(w_q, at, row, 0, m, d, BM, D, M_TAIL, D_TAIL)
        G_0 = _load(grad_output, at, row, 0, m, e, BM, E, M_TAIL, E_TAIL)
        G_w = _load(w_grad_output, at, row, 0, m, e, BM, E, M_TAIL, E_TAIL)
        end = tl.minimum(n, row + BM) if CAUSAL else n
    else:
        column = block * BN
        k_at = (sample, k_sizes)
        k_0 = _load(k, k_at, column, 0, n, d, BN, D, N_TAIL, D_TAIL)
        k_u = _load(u_k, k_at, column, 0, n, d, BN, D, N_TAIL, D_TAIL)
        k_w = _load(w_k, k_at, column, 0, n, d, BN, D, N_TAIL, D_TAIL)
        v_0 = _load(v, k_at, column, 0, n, e, BN, E, N_TAIL, E_TAIL)
        v_u = _load(u_v, k_at, column, 0, n, e, BN, E, N_TAIL, E_TAIL)
        v_w = _load(w_v, k_at, column, 0, n, e, BN, E, N_TAIL, E_TAIL)
        end = m
        if CAUSAL:
            begin = column // BM * BM
    of_d = tl.zeros((LENGTH, D), tl.float32)
    of_e = tl.zeros((LENGTH, E), tl.float32)

    for member in range(sharing):
        for place in range(begin, end, STEP):
            if OF_ROWS:
                column = place
                k_0 = _load(k, at, column, 0, n, d, BN, D, N_TAIL, D_TAIL)
                k_u = _load(u_k, at, column, 0, n, d, BN, D, N_TAIL, D_TAIL)
                k_w = _load(w_k, at, column, 0, n, d, BN, D, N_TAIL, D_TAIL)
                v_0 = _load(v, at, column, 0, n, e, BN, E, N_TAIL, E_TAIL)
                v_u = _load(u_v, at, column, 0, n, e, BN, E, N_TAIL, E_TAIL)
                v_w = _load(w_v, at, column, 0, n, e, BN, E, N_TAIL, E_TAIL)
                visible = (column + tl.arange(0, BN) < n)[None, :]
            else:
                row = place
                at = (sample * sharing + member, sizes)
                q_0 = _load(q, at, row, 0, m, d, BM, D, M_TAIL, D_TAIL)
                q_u = _load(u_q, at, row, 0, m, d, BM, D, M_TAIL, D_TAIL)
                q_w = _load(w_q, at, row, 0, m, d, BM, D, M_TAIL, D_TAIL)
                G_0 = _load(grad_output, at, row, 0, m, e, BM, E, M_TAIL, E_TAIL)
                G_w = _load(w_grad_output, at, row, 0, m, e, BM, E, M_TAIL, E_TAIL)
                visible = (row + tl.arange(0, BM) < m)[None, :]
            if CAUSAL:
                rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
                if OF_ROWS:
                    visible = visible & (rows[:, None] >= columns[None, :])
                else:
                    visible = visible & (rows[None, :] >= columns[:, None])

            X = _plus_scores(None, q_0, k_0, OF_ROWS, PRECISION)
            X_u = _plus_scores(None, q_u, k_0, OF_ROWS, PRECISION)
            X_u = _plus_scores(X_u, q_0, k_u, OF_ROWS, PRECISION)
            X_w = _plus_scores(None, q_w, k_0, OF_ROWS, PRECISION)
            X_w = _plus_scores(X_w, q_0, k_w, OF_ROWS, PRECISION)
            X_uw = _plus_scores(None, q_u, k_w, OF_ROWS, PRECISION)
            X_uw = _plus_scores(X_uw, q_w, k_u, OF_ROWS, PRECISION)
            A = _tanh(X * scale, TANH)
            slope = scale * (1 - A * A)
            A_u, A_w = _times(slope, X_u), _times(slope, X_w)
            slope_u = _times(-2 * scale * A, A_u)
            slope_w = _times(-2 * scale * A, A_w)
            A_uw = _plus(_times(slope_w, X_u), _times(slope, X_uw))

            if OF_SCORES:
                T = _plus_scores(None, G_0, v_0, OF_ROWS, PRECISION)
                T_u = _plus_scores(None, G_0, v_u, OF_ROWS, PRECISION)
                T_w = _plus_scores(None, G_0, v_w, OF_ROWS, PRECISION)
                T_w = _plus_scores(T_w, G_w, v_0, OF_ROWS, PRECISION)
                T_uw = _plus_scores(None, G_w, v_u, OF_ROWS, PRECISION)
                slope_uw = _plus(_times(A_u, A_w), _times(A, A_uw))
                slope_uw = _times(-2 * scale, slope_uw)
                D_u = _plus(_times(slope_u, T), _times(slope, T_u))
                D_w = _plus(_times(slope_w, T), _times(slope, T_w))
                D_uw = _plus(_times(slope_uw, T), _times(slope_u, T_w))
                D_uw = _plus(D_uw, _times(slope_w, T_u))
                D_uw = _plus(D_uw, _times(slope, T_uw))
            if OF_ROWS:
                if OF_OUTPUT:
                    of_e = _plus_product(of_e, A_uw, v_0, visible, PRECISION)
                    of_e = _plus_product(of_e, A_u, v_w, visible, PRECISION)
                    of_e = _plus_product(of_e, A_w, v_u, visible, PRECISION)
                if OF_SCORES:
                    of_d = _plus_product(of_d, D_uw, k_0, visible, PRECISION)
                    of_d = _plus_product(of_d, D_w, k_u, visible, PRECISION)
                    of_d = _plus_product(of_d, D_u, k_w, visible, PRECISION)
            else:
                if OF_OUTPUT:
                    of_e = _plus_product(of_e, A_uw, G_0, visible, PRECISION)
                    of_e = _plus_product(of_e, A_u, G_w, visible, PRECISION)
                if OF_SCORES:
                    of_d = _plus_product(of_d, D_uw, q_0, visible, PRECISION)
                    of_d = _plus_product(of_d, D_w, q_u, visible, PRECISION)
                    of_d = _plus_product(of_d, D_u, q_w, visible, PRECISION)

    if output_tangent is not None:
        _store(output_tangent, at, row, m, e, of_e, BM, E, E_TAIL)
    if grad_q is not None:
        _store(grad_q, at, row, m, d, of_d, BM, D, D_TAIL)
    if grad_k is not None:
        _store(grad_k, k_at, column, n, d, of_d, BN, D, D_TAIL)
    if grad_v is not None:
        _store(grad_v, k_at, column, n, e, of_e, BN, E, E_TAIL)
