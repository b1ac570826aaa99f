// FP8 (e4m3) attention forward for Hopper (sm_90a): softmax(q·kᵀ)·v, head size 128, no mask, any number of tokens.
//
// Hopper's FP8 tensor cores keep about 14 bits of their accumulator, so sums over thousands of keys are lost. Here P·V
// runs in the tensor cores for FLUSH_BLOCKS blocks of keys only; then it is added to a float32 sum. That sum lies in
// shared memory, each thread's own 64 values: the registers of three groups of query rows have no room for it.
//
// q [batch][queries][heads][128] and k [batch][keys][heads][128] are read through tensor maps, which fill rows past the
// last token with zeros. v lies in global memory as the shared-memory image that wgmma reads, so plain bulk copies load
// it:
//   v  [batch][head][ceil(keys/128)][128 rows × 128 B]    rows are channels, bytes are keys, in the order below
// In each image byte x of row r lies at  128·r + (x ^ 16·(r mod 8)): the 128-byte swizzle, which the tensor maps apply
// to q and k. Keys past the last one are zero. Within 32 keys of a block, byte 16·h + 4·q + 2·b + e of v holds key 16·h
// + 8·b + 2·q + e (h, b, e < 2, q < 4): the order in which the registers of q·kᵀ, packed four to a register, feed P·V
// without any exchange of data. h3opt/kernels/triton_kernels/attention_tiles.py writes v so.
//
// NVRTC compiles this file (h3opt/kernels/cuda_kernels/nvrtc.py), so it includes no header.
//
// A NaN in a query stays in that row and head. A NaN among the keys makes the head NaN, and a NaN in v the channel of
// that head: 0 · NaN is NaN in the tensor cores too. A NaN probability, code 0x7f, counts as one that does not fit
// (FULL below): its warp then takes the slow path, which leaves it NaN.

using uint8_t = unsigned char;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

namespace {

constexpr int HEAD = 128;        // channels of a head
constexpr int ROWS = 64;         // query rows of a warp group
constexpr int GROUPS = 3;        // warp groups that compute; a fourth loads
constexpr int KEYS = 128;        // keys of a block
constexpr int STAGES = 3;        // blocks of keys in shared memory
constexpr int FLUSH_BLOCKS = 4;  // blocks of keys that the tensor cores sum before float32 takes over
constexpr int Q_BYTES = ROWS * HEAD;
constexpr int KV_BYTES = KEYS * HEAD;
constexpr int V_STAGE = KV_BYTES + 8 * KEYS;  // v and eight channels of ones, which sum P
constexpr int SUM_BYTES = ROWS * HEAD * 4;
constexpr int OUT_BYTES = HEAD * 2;        // of an output row
constexpr int OUT_PITCH = OUT_BYTES + 16;  // of a staged output row: the 16 spread rows over the banks

// P = exp2(logit - reference + P_SHIFT). The reference is a maximum of the row when it is set and stays until a P
// reaches e4m3's largest value, which shows in the packed bytes. So no maximum is searched for in most blocks.
constexpr float P_SHIFT = 5.9f;  // just below a power of two, where e4m3's steps are relatively small
constexpr uint32_t ONE = 0x38383838, NEAR = 0x02020202, FULL = 0x80808080;  // bytes: 1.0; 0x7e (448) + NEAR sets FULL

constexpr float LOGIT_UNIT = 1.4426950408889634f / 11.313708498984761f;  // log2(e) / √HEAD: exp2 then gives the softmax

struct alignas(64) TensorMap {  // as the driver encodes it
    uint64_t words[16];
};

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// ---- mbarriers ------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void barrier_init(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, int phase) {
    asm volatile(
        "{ .reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again; }" ::"r"(bar), "r"(phase) : "memory");
}
__device__ __forceinline__ void copy_in(uint32_t to, const void *from, int bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
// Rows from `row` on of one head, as many as the map's box has.
__device__ __forceinline__ void copy_rows(uint32_t to, const TensorMap &map, int head, int row, int batch,
                                          uint32_t bar) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];"
                 ::"r"(to), "l"(&map), "r"(0), "r"(head), "r"(row), "r"(batch), "r"(bar) : "memory");
}
// ---- wgmma ----------------------------------------------------------------------------------------------------------
// Descriptor of a K-major operand with the 128-byte swizzle: groups of eight rows are 1,024 bytes apart.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
constexpr uint64_t STEP = 32 >> 4;  // 32 bytes of depth a step, in the descriptor's unit

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define F32(d) F16(d, 0), F16(d, 16)
#define F68(d) F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48), F4(d, 64)
#define D32                                                                                                            \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
    "%30,%31}"
#define D68                                                                                                            \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
    "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
    "%58,%59,%60,%61,%62,%63,%64,%65,%66,%67}"

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until at most PENDING groups run. The registers are named so that the compiler moves no use of them across.
template <int PENDING> __device__ __forceinline__ void wgmma_wait(float (&d)[68]) {
    asm volatile("wgmma.wait_group.sync.aligned %68;" : F68(d) : "n"(PENDING) : "memory");
}
template <int PENDING> __device__ __forceinline__ void wgmma_wait(float (&d)[32]) {
    asm volatile("wgmma.wait_group.sync.aligned %32;" : F32(d) : "n"(PENDING) : "memory");
}
template <int KEEP> __device__ __forceinline__ void mma_shared(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " D32 ", %32, %33, p, 1, 1; }"
                 : F32(d) : "l"(a), "l"(b), "n"(KEEP));
}
__device__ __forceinline__ void mma_registers(float (&d)[68], const uint32_t *a, uint64_t b, int keep) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %73, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 " D68 ", {%68,%69,%70,%71}, %72, p, 1, 1; }"
                 : F68(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}
__device__ __forceinline__ void multiply_qk(float (&s)[32], uint64_t q, uint64_t k) {
    mma_shared<0>(s, q, k);
    mma_shared<1>(s, q + STEP, k + STEP);
    mma_shared<1>(s, q + 2 * STEP, k + 2 * STEP);
    mma_shared<1>(s, q + 3 * STEP, k + 3 * STEP);
    wgmma_commit();
}
__device__ __forceinline__ void multiply_pv(float (&o)[68], const uint32_t (&p)[8], uint64_t v, int keep) {
    mma_registers(o, p, v, keep);
    mma_registers(o, p + 4, v + STEP, 1);
    wgmma_commit();
}

// ---- softmax --------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float exp2_unit(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ uint32_t pack4(float a, float b, float c, float d) {
    uint32_t r;
    asm("{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1; cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
        "mov.b32 %0, {lo, hi}; }"
        : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
    return r;
}
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(low), "f"(high));
    return r;
}
// A thread holds rows r and r + 8 of its warp's 16; the four threads of a quad share them.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ void thread_max(const float (&s)[32], float (&m)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        m[r] = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
        for (int i = 1; i < 8; i++) m[r] = fmaxf(m[r], fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
    }
}
// Half a block's logits s to probabilities p, relative to `reference`. True where all fit e4m3.
__device__ __forceinline__ bool probabilities(const float (&s)[32], uint32_t (&p)[8], const float (&reference)[2],
                                              float scale) {
    const float bias[2] = {fmaf(-reference[0], scale, P_SHIFT), fmaf(-reference[1], scale, P_SHIFT)};
    uint32_t largest = 0;
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float e[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int column = 2 * pair + c / 2;
                e[c] = exp2_unit(fmaf(s[4 * column + 2 * r + c % 2], scale, bias[r]));
            }
            const uint32_t packed = pack4(e[0], e[1], e[2], e[3]);
            p[2 * pair + r] = packed, largest |= packed + NEAR;
        }
    }
    return !__any_sync(~0u, largest & FULL);
}

// The stage that a block of keys lies in, and the parity of its barriers' phase.
struct Ring {
    int stage = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// What a thread carries over the blocks of keys.
struct Row {
    float reference[2];  // the logits that P is relative to, in units of q·kᵀ
    float stored[2];     // the references of the sums in shared memory
    float total[2];      // the sums of P, as far as in those
    bool any_stored;
};
// Move the tensor cores' short sums to the float32 sums in shared memory.
__device__ __forceinline__ void flush(const float (&o)[68], float4 *sums, Row &row, float scale) {
    if (row.any_stored) {
        float f[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            f[r] = exp2_unit((row.stored[r] - row.reference[r]) * scale);
            row.total[r] = fmaf(row.total[r], f[r], o[64 + 2 * r]);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float4 x = sums[128 * i];
            x.x = fmaf(x.x, f[0], o[4 * i]), x.y = fmaf(x.y, f[0], o[4 * i + 1]);
            x.z = fmaf(x.z, f[1], o[4 * i + 2]), x.w = fmaf(x.w, f[1], o[4 * i + 3]);
            sums[128 * i] = x;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++) sums[128 * i] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
        row.total[0] = o[64], row.total[1] = o[66];
    }
    row.stored[0] = row.reference[0], row.stored[1] = row.reference[1], row.any_stored = true;
}
// Raise the reference to the rows' maxima, where they are larger.
__device__ __forceinline__ void raise_reference(const float (&mine)[2], float (&o)[68], Row &row, float scale) {
    float f[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float m = fmaxf(row.reference[r], quad_max(mine[r]));
        f[r] = exp2_unit((row.reference[r] - m) * scale);
        row.reference[r] = m;
    }
#pragma unroll
    for (int i = 0; i < 68; i++) o[i] *= f[i / 2 % 2];
}

struct Layout {  // of shared memory, in bytes
    static constexpr int q = 0, k = q + GROUPS * Q_BYTES, v = k + STAGES * KV_BYTES, sums = v + STAGES * V_STAGE,
                         barriers = sums + GROUPS * SUM_BYTES, bytes = barriers + 8 * (4 * STAGES + 1) + 1024;
};
static_assert(Layout::bytes == 225384, "h3opt/kernels/ops/hopper_attention.py launches with this number of bytes");

}  // namespace

// One block of threads: GROUPS · 64 query rows of one head. Each group takes a block's keys in two halves, because the
// logits of one half and P of two fit its 160 registers a thread: P·V of one half runs under the exponentials of the
// next, and the groups fill each other's waits. The exponentials (special-function unit) are what limits the speed.
//
// The tensor maps have boxes of GROUPS · ROWS rows of q and of KEYS rows of k, of one head each. The grid is
// (ceil(queries / 192), heads, batch), and a block has 512 threads and Layout::bytes of dynamic shared memory. The
// codes of q, k and v are the values times their scales: q_scale and k_scale [heads], v_scale [batch][heads]. v_mean
// [batch][heads][128] is added to the result: the mean over keys of v - codes / v_scale, so the mean that was taken
// from v before it was quantized, and that of the rounding errors. out [batch][queries][heads][128] is bf16.
extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    fp8_attention(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                  const uint8_t *v_tiles, const float *q_scale, const float *k_scale, const float *v_scale,
                  const float *v_mean, uint8_t *out, int queries, int keys) {
    using L = Layout;
    extern __shared__ uint8_t raw[];
    uint8_t *memory = raw + (1024 - (shared_address(raw) & 1023)) % 1024;
    const uint32_t base = shared_address(memory), bars = base + L::barriers;
    const auto full_k = [&](int s) { return bars + 8 * s; };
    const auto full_v = [&](int s) { return bars + 8 * (STAGES + s); };
    const auto free_k = [&](int s) { return bars + 8 * (2 * STAGES + s); };
    const auto free_v = [&](int s) { return bars + 8 * (3 * STAGES + s); };
    const uint32_t full_q = bars + 8 * 4 * STAGES;
    const int blocks = (keys + KEYS - 1) / KEYS;
    const int heads = gridDim.y, head = blockIdx.y, batch = blockIdx.z, slice = batch * heads + head;
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full_k(s), 1), barrier_init(full_v(s), 1);
            barrier_init(free_k(s), 4 * GROUPS), barrier_init(free_v(s), 4 * GROUPS);  // one a warp
        }
        barrier_init(full_q, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (int i = threadIdx.x; i < STAGES * 2 * KEYS; i += blockDim.x)
        *reinterpret_cast<uint32_t *>(memory + L::v + i / (2 * KEYS) * V_STAGE + KV_BYTES + i % (2 * KEYS) * 4) = ONE;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads them
    __syncthreads();

    if (group == GROUPS) {  // the loading group
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 128 * GROUPS) {
            barrier_expect(full_q, GROUPS * Q_BYTES);
            copy_rows(base + L::q, q_map, head, blockIdx.x * GROUPS * ROWS, batch, full_q);
            const auto expect = [&](uint32_t full, uint32_t free, int phase) {
                barrier_wait(free, phase ^ 1);
                barrier_expect(full, KV_BYTES);
            };
            int stage = 0, phase = 0;
            for (int n = 0; n < blocks; n++) {  // from the last block, which alone may need masking, to the first
                const int block = blocks - 1 - n;
                expect(full_k(stage), free_k(stage), phase);
                copy_rows(base + L::k + stage * KV_BYTES, k_map, head, block * KEYS, batch, full_k(stage));
                expect(full_v(stage), free_v(stage), phase);
                copy_in(base + L::v + stage * V_STAGE, v_tiles + ((size_t)slice * blocks + block) * KV_BYTES, KV_BYTES,
                        full_v(stage));
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
        const float scale = LOGIT_UNIT / (q_scale[head] * k_scale[head]);
        const uint64_t q = operand(base + L::q + group * Q_BYTES), k0 = operand(base + L::k), v0 = operand(base + L::v);
        const auto release = [&](uint32_t bar) {
            if (lane == 0) barrier_arrive(bar);
        };
        Ring ring_k, ring_v;
        const auto wait_k = [&]() { barrier_wait(full_k(ring_k.stage), ring_k.phase); };
        const auto wait_v = [&]() { barrier_wait(full_v(ring_v.stage), ring_v.phase); };
        const auto start_qk = [&](float (&s)[32], int half) {
            wgmma_begin();
            multiply_qk(s, q, k0 + (uint64_t)(ring_k.stage * (KV_BYTES >> 4) + half * (KV_BYTES >> 5)));
        };
        float o[68];
        float4 *sums = reinterpret_cast<float4 *>(memory + L::sums + group * SUM_BYTES) + thread;
        int keep = 0, since = 0;  // keep: the tensor cores' sum continues; since: blocks in it
        const auto start_pv = [&](const uint32_t (&p)[8], int half) {
            wgmma_begin();
            multiply_pv(o, p, v0 + (uint64_t)(ring_v.stage * (V_STAGE >> 4)) + half * 2 * STEP, keep);
            keep = 1;
        };
        Row row = {};
        // One half's softmax, s to p, while the products before it end.
        const auto softmax = [&](const float (&s)[32], uint32_t (&p)[8]) {
            if (!probabilities(s, p, row.reference, scale)) {
                float m[2];
                thread_max(s, m);
                wgmma_wait<0>(o);
                raise_reference(m, o, row, scale);
                probabilities(s, p, row.reference, scale);
            }
        };

        float s0[32], s1[32];
        uint32_t p0[8], p1[8];
        barrier_wait(full_q, 0);
        wait_k();
        start_qk(s0, 0);
        start_qk(s1, 1);
        wgmma_wait<0>(s0);
        wgmma_wait<0>(s1);
        release(free_k(ring_k.stage)), ring_k.next();
        if (keys % KEYS) {  // the first block to be computed is the last one: mask the keys past the end
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const float minus_infinity = __int_as_float(0xff800000);
                const int key = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
                if (key >= keys % KEYS) s0[i] = minus_infinity;
                if (key + 64 >= keys % KEYS) s1[i] = minus_infinity;
            }
        }
        {
            float m[2][2];
            thread_max(s0, m[0]), thread_max(s1, m[1]);
            row.reference[0] = quad_max(fmaxf(m[0][0], m[1][0])), row.reference[1] = quad_max(fmaxf(m[0][1], m[1][1]));
            probabilities(s0, p0, row.reference, scale);
            probabilities(s1, p1, row.reference, scale);
        }
        wait_v();
        start_pv(p0, 0);
        wgmma_wait<0>(o);
        for (int n = 1; n < blocks; n++) {  // at its top P of block n - 1 is ready, and its first half multiplied
            wait_k();
            start_qk(s0, 0);
            start_pv(p1, 1);
            wgmma_wait<1>(s0);
            softmax(s0, p0);
            wgmma_wait<0>(o);
            release(free_v(ring_v.stage)), ring_v.next();
            start_qk(s0, 1);  // runs under the flush
            if (++since == FLUSH_BLOCKS) flush(o, sums, row, scale), since = 0, keep = 0;
            wait_v();
            start_pv(p0, 0);
            wgmma_wait<1>(s0);
            release(free_k(ring_k.stage)), ring_k.next();
            softmax(s0, p1);
            wgmma_wait<0>(o);
        }
        start_pv(p1, 1);
        wgmma_wait<0>(o);

        // Both sums together, divided by the rows' sums, staged in shared memory for wide stores.
        float f[2] = {o[64], o[66]};
        if (row.any_stored) {
            const float past[2] = {exp2_unit((row.stored[0] - row.reference[0]) * scale),
                                   exp2_unit((row.stored[1] - row.reference[1]) * scale)};
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const float4 x = sums[128 * i];
                o[4 * i] = fmaf(x.x, past[0], o[4 * i]), o[4 * i + 1] = fmaf(x.y, past[0], o[4 * i + 1]);
                o[4 * i + 2] = fmaf(x.z, past[1], o[4 * i + 2]), o[4 * i + 3] = fmaf(x.w, past[1], o[4 * i + 3]);
            }
            f[0] = fmaf(row.total[0], past[0], f[0]), f[1] = fmaf(row.total[1], past[1], f[1]);
        }
        f[0] = 1 / (f[0] * v_scale[slice]), f[1] = 1 / (f[1] * v_scale[slice]);
        asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");  // all have read their sums
        uint8_t *stage = memory + L::sums + group * SUM_BYTES;
        uint8_t *mine = stage + (16 * warp + lane / 4) * OUT_PITCH + 4 * (lane % 4);
        const float2 *mean = reinterpret_cast<const float2 *>(v_mean + (size_t)slice * HEAD) + lane % 4;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float2 mu = mean[4 * i];
#pragma unroll
            for (int r = 0; r < 2; r++)
                *reinterpret_cast<uint32_t *>(mine + 8 * r * OUT_PITCH + 16 * i) =
                    pack_bf16(fmaf(o[4 * i + 2 * r], f[r], mu.x), fmaf(o[4 * i + 2 * r + 1], f[r], mu.y));
        }
        __syncwarp();  // a warp stores its own 16 rows, two at a time
        const int first_row = (blockIdx.x * GROUPS + group) * ROWS + 16 * warp;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int r = 2 * i + lane / 16;
            const size_t row = (size_t)batch * queries + first_row + r;
            if (first_row + r < queries)
                *reinterpret_cast<uint4 *>(out + (row * heads + head) * OUT_BYTES + 16 * (lane % 16)) =
                    *reinterpret_cast<const uint4 *>(stage + (16 * warp + r) * OUT_PITCH + 16 * (lane % 16));
        }
    }
}
