// Layers of the Llama family over rows of sequences, in one call: products, norms, rotation, attention, gate. All rows go
// through one order of operations, those of prompts through another, so that a row has the same bits whatever rows stand
// beside it; what is between two operations is rounded to bfloat16, as in the model's own code. And a product alone.
#include <omp.h>
#include <stdlib.h>

#include <chrono>

#include "../argmax/native.h"
#include "../linear/native.h"
#include "../matmul_w4/native.h"
#include "../verify_attention/native.h"

// Adds up how long calls took, for those who ask what the rest of a step is.
struct Timed {
    static std::atomic<int64_t> nanoseconds;
    std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
    ~Timed() { nanoseconds += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count(); }
};
std::atomic<int64_t> Timed::nanoseconds{0};

extern "C" int64_t nanoseconds() { return Timed::nanoseconds; }

struct Product {
    const uint8_t* data;    // codes (bits 4, 8), or bfloat16 [N, K] (bits 16)
    const uint16_t* bias;   // [N], or null
    const int32_t* order;   // in which columns are read, or null
    int32_t N, K, group, bits, shifted, whole;  // whole: an input row is rounded with one scale
};

struct Fused {  // products of one input, side by side
    Product parts[3];
    int32_t count, N;
};

struct Layer {
    Fused qkv, output, gate_up, down;
    const uint16_t *attention_norm, *mlp_norm, *qk_norm;  // qk_norm: [Hq + Hkv, D], or null
    float eps, scale;
    int32_t heads, kv_heads, rotates, owns;
    Sight sight;
};

struct Part {  // the rows of one sequence: the last ones staged of it
    const uint8_t* sees;     // [.., width]: which of its staged rows see which; null: each sees those before it
    int32_t first, stop;     // of the forward
    int32_t prefix, staged;  // keys of it
    int32_t width;
};

struct Call {
    const Layer* layers;
    const Pool* pools;      // one a layer
    const Place* places;    // [kinds, parts]
    const int32_t* order;  // of layers
    const Part* parts;
    const int64_t* positions;           // [T]
    const uint16_t *cos, *sin;          // [P, D]; sin with the sign of the half that is turned
    uint16_t* x;                        // [T, dim]: in and out
    int32_t count, part_count, T, dim, head_dim, mlp, threads, prompt;  // prompt: by the product for many rows
};

struct Room {
    char* at = nullptr;
    size_t size = 0;

    ~Room() { free(at); }

    bool hold(size_t needed) {
        if (needed <= size) return true;
        free(at);
        at = (char*)aligned_alloc(64, (needed + 4095) / 4096 * 4096);
        size = at ? needed : 0;
        return at;
    }
};

// Hands out memory of a room, or counts what is needed.
struct Taken {
    char* base;
    size_t used = 0;

    template <typename T>
    T* take(size_t n) {
        T* at = (T*)(base + used);
        used += (n * sizeof(T) + 63) / 64 * 64;
        return at;
    }
};

static Rounded rounded_in(Taken& from, int T, int K, int group) {
    return {from.take<int8_t>((size_t)T * K), from.take<float>((size_t)T * (K / BLOCK)), from.take<float>((size_t)T * (K / group))};
}

// What a product's inputs are rounded into: one buffer for each of its parts.
struct Inputs {
    Rounded parts[3];
    uint16_t* ordered;  // [T, K], where columns are read in an order of their own
};

static bool alike(const Product& a, const Product& b) {
    return a.bits != 16 && b.bits != 16 && a.group == b.group && a.order == b.order && a.whole == b.whole;
}

// Row t of x [T, K], groups of columns that lie within `first` to `stop`.
static void prepare(const Fused& f, Inputs& in, const uint16_t* x, int t, int first, int stop) {
    for (int i = 0; i < f.count; i++) {
        const Product& p = f.parts[i];
        if (p.bits == 16 || (i && alike(p, f.parts[i - 1]))) continue;
        const uint16_t* from = x;
        if (p.order) {
            uint16_t* row = in.ordered + (int64_t)t * p.K;
            for (int k = first; k < stop; k++) row[k] = x[(int64_t)t * p.K + p.order[k]];
            from = in.ordered;
        }
        round_groups(from, in.parts[i], t, p.K, p.group, first / p.group, stop / p.group, p.whole);
    }
}

static Inputs inputs_of(Taken& from, const Fused& f, int T) {
    Inputs in = {};
    bool ordered = false;
    for (int i = 0; i < f.count; i++) {
        const Product& p = f.parts[i];
        if (p.bits == 16) continue;
        in.parts[i] = i && alike(p, f.parts[i - 1]) ? in.parts[i - 1] : rounded_in(from, T, p.K, p.group);
        ordered |= p.order != nullptr;
    }
    if (ordered) in.ordered = from.take<uint16_t>((size_t)T * f.parts[0].K);
    return in;
}

// Columns that are rounded together, of whole groups; all, where they are read in an order of their own.
static int unit_of(const Product& p) {
    const int least = p.K % 256 ? 32 : 256;
    int unit = least;
    if (p.order) return p.K;
    while (p.bits != 16 && unit % p.group) unit += least;
    return p.K % unit ? p.K : unit;
}

static void multiply_codes(const Product& p, const Rounded& x, int first, int end, int T, uint16_t* y, int stride) {
    const int64_t bytes = (int64_t)(p.K / p.group) * (TILE * (p.shifted ? 4 : 3) + p.group * TILE * p.bits / 8);
    auto* of = p.bits == 4 ? (p.shifted ? tiles<4, true> : tiles<4, false>) : (p.shifted ? tiles<8, true> : tiles<8, false>);
    of({p.data, p.N, p.K, p.group, bytes}, first, end, x, T, p.bias, y, stride);
}

static int tiles_of(const Product& p) { return (p.N + TILE - 1) / TILE; }

static void multiply(const Fused& f, const Inputs& in, const uint16_t* x, int T, uint16_t* y, int me, int threads) {
    for (int i = 0, at = 0; i < f.count; at += f.parts[i++].N) {
        const Product& p = f.parts[i];
        const int first = share(tiles_of(p), me, threads), end = share(tiles_of(p), me + 1, threads);
        if (p.bits != 16) multiply_codes(p, in.parts[i], first, end, T, y + at, f.N);
        else dense((const uint16_t*)p.data, p.bias, p.K, first * TILE, end * TILE < p.N ? end * TILE : p.N, x, T, y + at, f.N);
    }
}

// Of a prompt: tiles are taken as threads come to them. `sums`: room for [T, TILE].
static void multiply_many(const Fused& f, const Inputs& in, const uint16_t* x, int T, uint16_t* y, std::atomic<int>& next, float* sums) {
    int count = 0;
    for (int i = 0; i < f.count; i++) count += tiles_of(f.parts[i]);
    for (int tile = next++, then; tile < count; tile = then) {
        then = next++;
        int i = 0, at = 0, n = tile;
        for (; n >= tiles_of(f.parts[i]); at += f.parts[i++].N) n -= tiles_of(f.parts[i]);
        const Product& p = f.parts[i];
        if (p.bits != 16) {
            multiply_codes(p, in.parts[i], n, n + 1, T, y + at, f.N);
            continue;
        }
        const int64_t size = (int64_t)TILE * p.K;
        const uint16_t *weight = (const uint16_t*)p.data, *tile_weight = weight + n * size;
        uint16_t* to = y + at + n * TILE;
        if (p.N - n * TILE < TILE) dense(weight, p.bias, p.K, n * TILE, p.N, x, T, y + at, f.N);
        else dense_many(tile_weight, p.bias ? p.bias + n * TILE : nullptr, p.K, tile_weight + (then - tile) * size, x, T, to, f.N, sums);
    }
}

static void norm(const uint16_t* x, const uint16_t* weight, float eps, int dim, uint16_t* y) {
    floats squares = {};
    for (int i = 0; i < dim; i += 16) {
        const floats a = from_bf16(x + i);
        squares = a * a + squares;
    }
    const floats by = all(1.f / sqrtf(added(squares) / (float)dim + eps));
    for (int i = 0; i < dim; i += 16) to_bf16(from_bf16(x + i) * by * from_bf16(weight + i), y + i);
}

static void add(uint16_t* x, const uint16_t* more, int n) {
    for (int i = 0; i < n; i += 16) to_bf16(from_bf16(x + i) + from_bf16(more + i), x + i);
}

static void turn(uint16_t* x, const uint16_t* cos, const uint16_t* sin, int D) {
    const int half = D / 2;
    for (int i = 0; i < half; i += 16) {
        const floats a = from_bf16(x + i), b = from_bf16(x + half + i);
        const floats left = b * from_bf16(sin + i), right = a * from_bf16(sin + half + i);
        to_bf16(a * from_bf16(cos + i) + left, x + i);
        to_bf16(b * from_bf16(cos + half + i) + right, x + half + i);
    }
}

static void gate(const uint16_t* both, int mlp, int first, int stop, uint16_t* y) {
    for (int i = first; i < stop; i += 16) {
        const floats g = from_bf16(both + i);
        uint16_t half[16];
        to_bf16(g / (all(1.f) + exponential(-g)), half);
        to_bf16(from_bf16(half) * from_bf16(both + mlp + i), y + i);
    }
}

// Which of a row's keys lie where: key n < prefix in slot n, those behind in slots prefix + its staged ancestors.
struct Row {
    int part, position;
    bool straight;  // the ancestors are the first staged ones
    const int32_t* ancestors;
};

static int splits_of(const Part& part) { return (part.prefix + part.staged + SPLIT - 1) / SPLIT; }

// The rows `from` to `to` of a part over split s of the keys of head h; `out`: those of row `from`, head 0 and split 0 of
// `splits`.
static void attend_task(const Layer& l, const Call& c, int p, int from, int to, const Row* row, const uint16_t* qkv, const Pool& pool,
                        int h, int s, int splits, Partial out) {
    const Part& part = c.parts[p];
    const Place& place = c.places[pool.kind * c.part_count + p];
    const Attend attend = attend_of(c.head_dim, pool.bits);
    const int D = c.head_dim, G = l.heads / l.kv_heads, begin = s * SPLIT, W = l.sight.window;
    const int64_t head = h * pool.slots, bytes = head * D * pool.bits / 8;
    const Keys keys = {(const uint8_t*)pool.k + bytes, (const uint8_t*)pool.v + bytes, pool.k_scale + head, pool.v_scale + head};
    const bool runs = straight(place);
    int32_t slots[SPLIT];
    int listed = 0;  // of the split's keys in the order of their numbers: those whose slots are known
    auto list = [&](int n) {
        for (; listed < n; listed++)
            slots[listed] = (int32_t)(begin + listed < part.prefix ? committed_slot(place, begin + listed)
                                                                   : staged_slot(place, part.prefix, begin + listed - part.prefix));
    };
    Query queries[QUERIES];
    int count = 0;
    auto flush = [&](bool direct) {  // whether they take their keys one after the other
        if (count) attend(queries, count, keys, direct ? nullptr : slots, place.base + begin, begin, l.sight, l.scale);
        count = 0;
    };
    for (int t = part.first > from ? part.first : from; t < part.stop && t < to; t++) {
        const int n = row[t].position + 1 - begin < SPLIT ? row[t].position + 1 - begin : SPLIT;
        if (n <= 0) continue;
        const bool unseen = W >= 0 && begin + n <= row[t].position - W + 1 && begin >= l.sight.sink;
        // a row that does not see all staged before it; such rows are followed by none that does
        const bool alone = !row[t].straight && begin + n > part.prefix;
        if (alone) {
            flush(runs);
            const int known = part.prefix - begin > 0 ? part.prefix - begin : 0;
            list(known);
            for (int j = known; j < n; j++)
                slots[j] = (int32_t)staged_slot(place, part.prefix, row[t].ancestors[begin + j - part.prefix]);
        } else if (!runs) {
            list(n);
        }
        for (int g = 0; g < G; g++) {
            const int64_t at = ((int64_t)(t - from) * l.heads + h * G + g) * splits + s;
            if (unseen) {
                out.sum[at] = 0;
                out.most[at] = -INFINITY;
                continue;
            }
            queries[count++] = {qkv + (int64_t)t * l.qkv.N + (h * G + g) * D, n, row[t].position,
                                {out.sum + at, out.most + at, out.values + at * D}};
            if (count == QUERIES) flush(runs && !alone);
        }
        if (alone) flush(false);
    }
    flush(runs);
}

// What `of_row` splits of a row say, of all heads. What is not a number stays so.
static void merge(const Layer& l, int of_row, int D, int splits, Partial of, uint16_t* y) {
    for (int h = 0; h < l.heads; h++, of.sum += splits, of.most += splits, of.values += (int64_t)splits * D) {
        float top = -INFINITY, whole = 0, *weight = of.most;
        for (int s = 0; s < of_row; s++) top = of.most[s] > top ? of.most[s] : top;
        for (int s = 0; s < of_row; s++) {
            weight[s] = of.most[s] == -INFINITY ? 0 : expf(of.most[s] - top);
            whole = weight[s] * of.sum[s] + whole;
        }
        const floats by = all(whole == 0 ? whole : 1.f / whole);
        for (int d = 0; d < D; d += 16) {
            floats sum = {};
            for (int s = 0; s < of_row; s++)
                if (weight[s] != 0) sum = all(weight[s]) * *(floats*)(of.values + (int64_t)s * D + d) + sum;
            to_bf16(sum * by, y + h * D + d);
        }
    }
}

extern "C" int layers(const Call* call) {
    const Timed timed;
    const Call& c = *call;
    const int T = c.T, D = c.head_dim;
    static thread_local Room room;
    int most_qkv = 0, most_heads = 0, longest = 0, staged = 0;
    for (int i = 0; i < c.count; i++) {
        const Layer& l = c.layers[c.order[i]];
        most_qkv = l.qkv.N > most_qkv ? l.qkv.N : most_qkv;
        most_heads = l.heads > most_heads ? l.heads : most_heads;
    }
    for (int p = 0; p < c.part_count; p++) {
        const int keys = c.parts[p].prefix + c.parts[p].staged;
        longest = keys > longest ? keys : longest;
        if (c.parts[p].sees) staged += (c.parts[p].stop - c.parts[p].first) * c.parts[p].staged;
    }
    const int splits = (longest + SPLIT - 1) / SPLIT;
    const int block = T > 32 ? 32 : T;  // rows that attend at once, which bounds what they leave for the merge
    uint16_t *normed, *qkv, *attended, *more, *both, *gated;
    float *sums, *tops, *values, *wide;
    Row* row;
    int32_t* ancestors;
    char* shared;
    auto share_out = [&](char* base) {
        Taken from = {base};
        normed = from.take<uint16_t>((size_t)T * c.dim);
        qkv = from.take<uint16_t>((size_t)T * most_qkv);
        attended = from.take<uint16_t>((size_t)T * most_heads * D);
        more = from.take<uint16_t>((size_t)T * c.dim);
        both = from.take<uint16_t>((size_t)T * 2 * c.mlp);
        gated = from.take<uint16_t>((size_t)T * c.mlp);
        sums = from.take<float>((size_t)block * most_heads * splits);
        tops = from.take<float>((size_t)block * most_heads * splits);
        values = from.take<float>((size_t)block * most_heads * splits * D);
        wide = from.take<float>(c.prompt ? (size_t)T * TILE * c.threads : 0);
        row = from.take<Row>(T);
        ancestors = from.take<int32_t>(staged);
        shared = base + from.used;
        return from.used;
    };
    size_t needed = share_out(nullptr), inputs = 0;
    for (int i = 0; i < c.count; i++) {
        const Layer& l = c.layers[c.order[i]];
        for (const Fused* f : {&l.qkv, &l.output, &l.gate_up, &l.down}) {
            Taken counted = {nullptr};
            inputs_of(counted, *f, T);
            inputs = counted.used > inputs ? counted.used : inputs;
        }
    }
    if (!room.hold(needed + inputs)) return 1;
    share_out(room.at);
    for (int p = 0; p < c.part_count; p++) {
        const Part& part = c.parts[p];
        for (int t = part.first; t < part.stop; t++) {
            const int number = part.staged - (part.stop - t);
            if (!part.sees) {
                row[t] = {p, part.prefix + number, true, nullptr};
                continue;
            }
            const uint8_t* sees = part.sees + (int64_t)number * part.width;
            int n = 0;
            bool straight = true;
            for (int j = 0; j < part.staged; j++)
                if (sees[j]) {
                    straight &= j == n;
                    ancestors[n++] = j;
                }
            row[t] = {p, part.prefix + n - 1, straight, ancestors};
            ancestors += n;
        }
    }
    Team team;
    team.threads = c.threads;
    std::atomic<int> next{0};  // which of the tasks that threads take as they come to them
#pragma omp parallel num_threads(c.threads)
    {
#pragma omp single
        team.threads = omp_get_num_threads();
        const int me = omp_get_thread_num(), threads = team.threads;
        auto times = [&](const Fused& f, const Inputs& in, const uint16_t* x, uint16_t* y) {
            if (c.prompt) multiply_many(f, in, x, T, y, next, wide + (size_t)me * T * TILE);
            else multiply(f, in, x, T, y, me, threads);
            team.wait();
            if (me == 0) next = 0;  // before they come to the tasks behind the next wait
        };
        auto mine = [&](int64_t items, auto each) {
            for (int64_t i = share(items, me, threads), end = share(items, me + 1, threads); i < end; i++) each(i);
        };
        for (int i = 0; i < c.count; i++) {
            const Layer& l = c.layers[c.order[i]];
            const Pool& pool = c.pools[c.order[i]];
            const int Hq = l.heads, Hkv = l.kv_heads, N = l.qkv.N;
            auto inputs = [&](const Fused& f) {
                Taken from = {shared};
                return inputs_of(from, f, T);
            };
            Inputs in = inputs(l.qkv);
            mine(T, [&](int64_t t) {
                uint16_t* x = c.x + t * c.dim;
                if (i) add(x, more + t * c.dim, c.dim);
                norm(x, l.attention_norm, l.eps, c.dim, normed + t * c.dim);
                prepare(l.qkv, in, normed, t, 0, c.dim);
            });
            team.wait();
            times(l.qkv, in, normed, qkv);
            const int turned = Hq + (l.owns ? 2 * Hkv : 0);
            mine((int64_t)T * turned, [&](int64_t item) {
                const int t = item / turned, h = item % turned;
                uint16_t* of = qkv + (int64_t)t * N + h * D;
                if (h < Hq + Hkv) {
                    if (l.qk_norm) norm(of, l.qk_norm + h * D, l.eps, D, of);
                    if (l.rotates) turn(of, c.cos + c.positions[t] * D, c.sin + c.positions[t] * D, D);
                    if (pool.bits == 4) spread(of, D);
                }
                if (h < Hq) return;
                const Part& part = c.parts[row[t].part];
                const Place& place = c.places[pool.kind * c.part_count + row[t].part];
                const int64_t slot = staged_slot(place, part.prefix, part.staged - (part.stop - t));
                const bool key = h < Hq + Hkv;
                const int64_t at = (h - Hq) % Hkv * pool.slots;
                keep(of, D, pool.bits, key ? pool.k : pool.v, key ? pool.k_scale : pool.v_scale, at + slot);
            });
            team.wait();
            int tasks = 0;
            for (int p = 0; p < c.part_count; p++) tasks += Hkv * splits_of(c.parts[p]);
            in = inputs(l.output);
            for (int from = 0; from < T; from += block) {
                const int to = from + block < T ? from + block : T;
                for (int task; (task = next++) < tasks;) {
                    int p = 0;
                    for (; task >= Hkv * splits_of(c.parts[p]); p++) task -= Hkv * splits_of(c.parts[p]);
                    const int of_head = splits_of(c.parts[p]);
                    attend_task(l, c, p, from, to, row, qkv, pool, task / of_head, task % of_head, splits, {sums, tops, values});
                }
                team.wait();
                if (me == 0) next = 0;
                mine(to - from, [&](int64_t t) {
                    const int64_t at = t * Hq * splits;
                    merge(l, row[from + t].position / SPLIT + 1, D, splits, {sums + at, tops + at, values + at * D},
                          attended + (from + t) * Hq * D);
                    prepare(l.output, in, attended, from + t, 0, Hq * D);
                });
                team.wait();
            }
            times(l.output, in, attended, more);
            in = inputs(l.gate_up);
            mine(T, [&](int64_t t) {
                uint16_t* x = c.x + t * c.dim;
                add(x, more + t * c.dim, c.dim);
                norm(x, l.mlp_norm, l.eps, c.dim, normed + t * c.dim);
                prepare(l.gate_up, in, normed, t, 0, c.dim);
            });
            team.wait();
            times(l.gate_up, in, normed, both);
            in = inputs(l.down);
            const int unit = unit_of(l.down.parts[0]), units = c.mlp / unit;
            mine((int64_t)T * units, [&](int64_t item) {
                const int t = item / units, at = item % units * unit;
                gate(both + (int64_t)t * 2 * c.mlp, c.mlp, at, at + unit, gated + (int64_t)t * c.mlp);
                prepare(l.down, in, gated, t, at, at + unit);
            });
            team.wait();
            times(l.down, in, gated, more);
        }
        mine(T, [&](int64_t t) { add(c.x + t * c.dim, more + t * c.dim, c.dim); });
    }
    return 0;
}

extern "C" void norm_rows(const uint16_t* x, const uint16_t* weight, float eps, int T, int dim, uint16_t* y) {
    const Timed timed;
    for (int64_t t = 0; t < T; t++) norm(x + t * dim, weight, eps, dim, y + t * dim);
}

// y [T, N] = x [T, K] Wᵀ + b
extern "C" int product(const Product* p, const uint16_t* x, uint16_t* y, int T, int threads, int prompt) {
    const Timed timed;
    const Fused f = {{*p}, 1, p->N};
    static thread_local Room room;
    Inputs in;
    float* sums;
    auto share_out = [&](char* base) {
        Taken from = {base};
        in = inputs_of(from, f, T);
        sums = from.take<float>(prompt ? (size_t)T * TILE * threads : 0);
        return from.used;
    };
    if (!room.hold(share_out(nullptr))) return 1;
    share_out(room.at);
    std::atomic<int> next{0};
#pragma omp parallel num_threads(threads)
    {
        const int me = omp_get_thread_num(), n = omp_get_num_threads();
        if (p->bits != 16) {
#pragma omp for schedule(static)
            for (int t = 0; t < T; t++) prepare(f, in, x, t, 0, p->K);
        }
        if (prompt) multiply_many(f, in, x, T, y, next, sums + (size_t)me * T * TILE);
        else multiply(f, in, x, T, y, me, n);
    }
    return 0;
}

// Of the structures that are handed over.
extern "C" void sizes(int* to) {
    for (const size_t size : {sizeof(Product), sizeof(Fused), sizeof(Layer), sizeof(Pool), sizeof(Place), sizeof(Part), sizeof(Call)})
        *to++ = (int)size;
}

// 1: a row has a NaN
extern "C" int argmax(const uint16_t* x, int64_t rows, int64_t n, int64_t* out) {
    const Timed timed;
    for (int64_t r = 0; r < rows; r++)
        if ((out[r] = argmax_row(x + r * n, n)) < 0) return 1;
    return 0;
}
