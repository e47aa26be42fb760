// What Python calls (kernels.py), for activations with their channels last, as rows of channels, on CPUs.
//
// Batch normalisation, the sum with a shortcut, and relu in as few passes over memory as possible. Forward, the
// convolution's result x is read twice (moments, then the result) and the result is written once. Backward, the gradient
// and x are read twice. Sources: Ioffe and Szegedy, "Batch Normalization" (2015), Algorithm 1 and section 3; the moments
// of blocks are merged as in Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm" (1979), equations 2.1.
//
// The temporal shift in place (Lin et al., "TSM", section 3): a quarter of a copy's traffic, and no memory.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

// ------------------------------------------------------------ number formats, threads, and writes past the caches

struct bf16 {
    uint16_t bits;
};

// The type that numbers of type T are computed in.
template <class T> struct compute { using type = T; };
template <> struct compute<bf16> { using type = float; };
template <class T> using A = typename compute<T>::type;

inline float load(float x) { return x; }
inline double load(double x) { return x; }
inline float load(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

inline void store(float& to, float x) { to = x; }
inline void store(double& to, double x) { to = x; }
inline void store(bf16& to, float x) { // round to nearest, ties to even; keep a NaN
    const uint32_t u = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    const uint32_t nan = (u >> 16) | 0x40;
    to.bits = uint16_t((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

constexpr int64_t SMALL = 1 << 15;       // elements that are not worth a second thread
constexpr int64_t BLOCK_BYTES = 1 << 17; // of x that stay in a core's cache between two readings
constexpr int64_t AHEAD_BYTES = 1 << 12; // distance of a prefetch
constexpr int64_t STREAMED = 1 << 22;    // bytes from which a result is written past the caches

// rows x channels elements, and the threads that share them.
struct Shape {
    int64_t rows, channels, threads;

    int64_t workers() const { return rows * channels < SMALL ? 1 : std::clamp<int64_t>(threads, 1, rows); }

    template <class T> bool is_large() const { return rows * channels * int64_t(sizeof(T)) >= STREAMED; }
};

// Call each(worker, first, last + 1) on an equal share of `count` items per worker.
template <class F> void in_parallel(int64_t workers, int64_t count, F each) {
#pragma omp parallel for num_threads(workers) schedule(static, 1) if (workers > 1)
    for (int64_t w = 0; w < workers; w++) each(w, count * w / workers, count * (w + 1) / workers);
}

// Prefetch a row that is read soon. This is faster than the processor's own prefetcher alone.
template <class T> inline void prefetch(const T* row, int64_t C) {
    constexpr int64_t LINE = 64 / sizeof(T);
    const int64_t rows = std::clamp<int64_t>(AHEAD_BYTES / int64_t(C * sizeof(T)), 2, 16);
    for (int64_t c = 0; c < C; c += LINE) __builtin_prefetch(row + rows * C + c);
}

#ifdef __SSE2__
inline void stream_line(void* to, const void* from) {
#if defined __AVX512F__
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_load_si512(from));
#elif defined __AVX__
    for (int i = 0; i < 2; i++)
        _mm256_stream_si256(static_cast<__m256i*>(to) + i, _mm256_load_si256(static_cast<const __m256i*>(from) + i));
#else
    for (int i = 0; i < 4; i++)
        _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_load_si128(static_cast<const __m128i*>(from) + i));
#endif
}
#endif

// to[c] = f(c). A large result goes past the caches (`stream`): it would leave them before anybody reads it, and a line
// that is written whole need not be read first.
template <class T, class F> inline void write(T* to, int64_t n, bool stream, F f) {
#ifdef __SSE2__
    constexpr int64_t LINE = 64 / sizeof(T);
    if (stream && n % LINE == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
        for (int64_t done = 0; done < n; done += LINE) {
            alignas(64) T line[LINE];
#pragma omp simd
            for (int64_t j = 0; j < LINE; j++) store(line[j], f(done + j));
            stream_line(to + done, line);
        }
        return;
    }
#endif
#pragma omp simd
    for (int64_t c = 0; c < n; c++) store(to[c], f(c));
}

// Order streamed writes before what follows.
inline void written(bool stream) {
#ifdef __SSE2__
    if (stream) _mm_sfence();
#endif
}

// ------------------------------------------------------------------------------------------------------- moments

struct Moments {
    std::vector<double> mean, squares; // squares: of the differences from the mean, summed
    int64_t count = 0;

    explicit Moments(int64_t channels) : mean(channels, 0), squares(channels, 0) {}

    template <class N> void merge(const double* other_mean, const N* other_squares, int64_t k) {
        const double share = double(k) / double(count + k), weight = double(count) * share;
        for (size_t c = 0; c < mean.size(); c++) {
            const double d = other_mean[c] - mean[c];
            mean[c] += d * share;
            squares[c] += other_squares[c] + d * d * weight;
        }
        count += k;
    }
};

// sum[c] += f(x, c) over rows, four at a time: otherwise each sum would wait for the one before.
template <class T, class F>
inline void add_rows(const T* x, int64_t C, int64_t first, int64_t last, A<T>* sum, F f) {
    int64_t r = first;
    for (; r + 4 <= last; r += 4) {
        const T* const at = x + r * C;
        prefetch(at, 4 * C);
#pragma omp simd
        for (int64_t c = 0; c < C; c++)
            sum[c] += (f(load(at[c]), c) + f(load(at[C + c]), c)) + (f(load(at[2 * C + c]), c) + f(load(at[3 * C + c]), c));
    }
    for (; r < last; r++) {
        const T* const at = x + r * C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) sum[c] += f(load(at[c]), c);
    }
}

template <class T> void moments_of_rows(const T* x, int64_t C, int64_t first, int64_t last, Moments& into) {
    const int64_t block = std::max<int64_t>(32, BLOCK_BYTES / int64_t(C * sizeof(T)));
    std::vector<A<T>> sum(C), mean(C);
    std::vector<double> wide(C);
    for (int64_t row = first; row < last; row += block) {
        const int64_t end = std::min(last, row + block);
        A<T>*const s = sum.data(), *const m = mean.data();
        std::fill(sum.begin(), sum.end(), A<T>(0));
        // Differences from the first row: a mean much larger than the deviations costs no digits.
        for (int64_t c = 0; c < C; c++) m[c] = load(x[row * C + c]);
        add_rows<T>(x, C, row, end, s, [m](A<T> value, int64_t c) { return value - m[c]; });
        for (int64_t c = 0; c < C; c++) m[c] = A<T>(wide[c] = double(m[c]) + double(s[c]) / double(end - row));
        std::fill(sum.begin(), sum.end(), A<T>(0));
        add_rows<T>(x, C, row, end, s, [m](A<T> value, int64_t c) { return (value - m[c]) * (value - m[c]); });
        into.merge(wide.data(), s, end - row);
    }
}

// Mean and biased variance of each channel over all rows.
template <class T> void moments(const T* x, const Shape& s, A<T>* mean, A<T>* variance) {
    std::vector<Moments> parts(s.workers(), Moments(s.channels));
    in_parallel(s.workers(), s.rows, [&](int64_t w, int64_t first, int64_t last) {
        moments_of_rows(x, s.channels, first, last, parts[w]);
    });
    for (size_t w = 1; w < parts.size(); w++)
        if (parts[w].count) parts[0].merge(parts[w].mean.data(), parts[w].squares.data(), parts[w].count);
    for (int64_t c = 0; c < s.channels; c++) {
        mean[c] = A<T>(parts[0].mean[c]);
        variance[c] = A<T>(parts[0].squares[c] / double(s.rows));
    }
}

// ------------------------------------------------------------------------------------------------------- forward

template <class T> struct Affine { // y = x * scale + shift
    std::vector<A<T>> scale, shift;

    template <class Tensors> Affine(const Tensors& t, int64_t C) : scale(C), shift(C) {
        for (int64_t c = 0; c < C; c++) {
            scale[c] = t.weight[c] * t.inverse[c];
            shift[c] = t.bias[c] - t.mean[c] * scale[c];
        }
    }
};

template <class N> inline N rectified(N x) { return x < 0 ? N(0) : x; } // keeps a NaN

// The tensors of a forward pass, in the order in which Python gives them.
template <class T> struct Forward {
    const T *x, *shortcut;
    T* result;
    const A<T>*weight, *bias;
    A<T>*running_mean, *running_variance, *mean, *inverse; // inverse: 1 / sqrt(variance + eps)
};

template <class T, bool SHORTCUT, bool RELU>
void apply(const Forward<T>& t, const Affine<T>& affine, const Shape& s) {
    const int64_t C = s.channels;
    const bool stream = s.is_large<T>();
    const A<T>*const scale = affine.scale.data(), *const shift = affine.shift.data();
    in_parallel(s.workers(), s.rows, [&](int64_t, int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            const T *const from = t.x + r * C, *const other = SHORTCUT ? t.shortcut + r * C : nullptr;
            prefetch(from, C);
            if constexpr (SHORTCUT) prefetch(other, C);
            write(t.result + r * C, C, stream, [=](int64_t c) {
                A<T> y = load(from[c]) * scale[c] + shift[c];
                if constexpr (SHORTCUT) y += load(other[c]);
                return RELU ? rectified(y) : y;
            });
        }
        written(stream);
    });
}

// Running statistics as in torch.nn.BatchNorm: r += momentum * (new - r), the variance unbiased.
template <class N> void run(N* running, const N* found, int64_t C, double momentum, double factor) {
    for (int64_t c = 0; c < C; c++)
        running[c] = N((1 - momentum) * double(running[c]) + momentum * factor * double(found[c]));
}

template <class T>
void forward(const Forward<T>& t, const Shape& s, bool train, bool relu, double momentum, double eps) {
    const int64_t C = s.channels;
    if (train) {
        moments(t.x, s, t.mean, t.inverse);
        if (t.running_mean) {
            run(t.running_mean, t.mean, C, momentum, 1);
            run(t.running_variance, t.inverse, C, momentum, double(s.rows) / double(s.rows - 1));
        }
    } else {
        std::copy(t.running_mean, t.running_mean + C, t.mean);
        std::copy(t.running_variance, t.running_variance + C, t.inverse);
    }
    for (int64_t c = 0; c < C; c++) t.inverse[c] = A<T>(1 / std::sqrt(double(t.inverse[c]) + eps));
    const Affine<T> affine(t, C);
    (t.shortcut ? apply<T, true, true> : relu ? apply<T, false, true> : apply<T, false, false>)(t, affine, s);
}

// ------------------------------------------------------------------------------------------------------ backward

// The tensors of a backward pass, in the order in which Python gives them.
template <class T> struct Backward {
    const T *grad, *result, *x;
    T *shortcut_grad, *x_grad;
    const A<T>*weight, *bias, *mean, *inverse;
    A<T>*weight_grad, *bias_grad;
};

// Where relu passes a gradient: where its result is above 0. x tells that too, unless a shortcut was added.
enum class Mask { none, by_x, by_result };

// A NaN in y lets the gradient pass, as in torch. Not a choice between it and 0: GCC makes that a masked load, half as
// fast on Zen 5.
template <class N> inline N masked(N grad, N y) {
    const N most = y <= 0 ? N(0) : std::numeric_limits<N>::infinity();
    return grad < -most ? -most : most < grad ? most : grad;
}

template <class T> struct Sums {
    std::vector<double> grad, product; // sums of grad, and of grad * (x - mean)
    std::vector<A<T>> block_grad, block_product;

    explicit Sums(int64_t C) : grad(C, 0), product(C, 0), block_grad(C, 0), block_product(C, 0) {}

    void flush() {
        for (size_t c = 0; c < grad.size(); c++) {
            grad[c] += block_grad[c];
            product[c] += block_product[c];
            block_grad[c] = block_product[c] = 0;
        }
    }
};

// First pass: both sums and, with a shortcut, the shortcut's gradient.
template <class T, Mask MASK> Sums<T> reduce(const Backward<T>& t, const Affine<T>& affine, const Shape& s) {
    const int64_t C = s.channels, block = std::max<int64_t>(32, BLOCK_BYTES / int64_t(C * sizeof(T)));
    const bool stream = s.is_large<T>();
    const A<T>*const scale = affine.scale.data(), *const shift = affine.shift.data(), *const mean = t.mean;
    std::vector<Sums<T>> parts(s.workers(), Sums<T>(C));
    in_parallel(s.workers(), s.rows, [&](int64_t w, int64_t first, int64_t last) {
        A<T>*const sum = parts[w].block_grad.data(), *const product = parts[w].block_product.data();
        for (int64_t r = first; r < last; r++) {
            const T *const from = t.x + r * C, *const dy = t.grad + r * C;
            const auto summed = [=](int64_t c, A<T> d) {
                sum[c] += d;
                product[c] += d * (load(from[c]) - mean[c]);
                return d;
            };
            prefetch(from, C);
            prefetch(dy, C);
            if constexpr (MASK == Mask::by_result) {
                const T* const y = t.result + r * C;
                prefetch(y, C);
                write(t.shortcut_grad + r * C, C, stream,
                      [=](int64_t c) { return summed(c, masked(load(dy[c]), load(y[c]))); });
            } else {
#pragma omp simd
                for (int64_t c = 0; c < C; c++) {
                    const A<T> d = load(dy[c]);
                    summed(c, MASK == Mask::by_x ? masked(d, load(from[c]) * scale[c] + shift[c]) : d);
                }
            }
            if ((r - first) % block == block - 1) parts[w].flush();
        }
        parts[w].flush();
        written(stream);
    });
    for (size_t w = 1; w < parts.size(); w++)
        for (int64_t c = 0; c < C; c++) {
            parts[0].grad[c] += parts[w].grad[c];
            parts[0].product[c] += parts[w].product[c];
        }
    return parts[0];
}

// Second pass: the gradient to x. The shortcut's gradient is masked already.
template <class T, Mask MASK>
void spread(const Backward<T>& t, const Affine<T>& affine, const std::vector<A<T>>& slopes,
            const std::vector<A<T>>& levels, const Shape& s) {
    const int64_t C = s.channels;
    const bool stream = s.is_large<T>();
    const A<T>*const scale = affine.scale.data(), *const shift = affine.shift.data(), *const slope = slopes.data(),
               *const level = levels.data(), *const mean = t.mean;
    const T* const grad = MASK == Mask::by_result ? t.shortcut_grad : t.grad;
    in_parallel(s.workers(), s.rows, [&](int64_t, int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            const T *const from = t.x + r * C, *const dy = grad + r * C;
            prefetch(from, C);
            prefetch(dy, C);
            write(t.x_grad + r * C, C, stream, [=](int64_t c) {
                const A<T> here = load(from[c]);
                A<T> d = load(dy[c]);
                if constexpr (MASK == Mask::by_x) d = masked(d, here * scale[c] + shift[c]);
                return scale[c] * d + (slope[c] * (here - mean[c]) + level[c]);
            });
        }
        written(stream);
    });
}

template <class T, Mask MASK> void backward(const Backward<T>& t, const Shape& s, bool train) {
    const int64_t C = s.channels;
    const Affine<T> affine(t, C);
    const Sums<T> sums = reduce<T, MASK>(t, affine, s);
    std::vector<A<T>> slopes(C, 0), levels(C, 0);
    for (int64_t c = 0; c < C; c++) {
        t.weight_grad[c] = A<T>(sums.product[c] * t.inverse[c]);
        t.bias_grad[c] = A<T>(sums.grad[c]);
        if (train) { // otherwise mean and variance are constants
            const double each = double(affine.scale[c]) / double(s.rows);
            slopes[c] = A<T>(-each * sums.product[c] * t.inverse[c] * t.inverse[c]);
            levels[c] = A<T>(-each * sums.grad[c]);
        }
    }
    if (t.x_grad) spread<T, MASK>(t, affine, slopes, levels, s);
}

// ----------------------------------------------------------------------------------------------- temporal shift

// Clips of `frames` frames, each `pixels` rows of `channels` channels.
struct Clips {
    int64_t clips, frames, pixels, channels, threads;
};

// Channels [begin, end); those of frame t + step (1 or -1) go to frame t.
struct Group {
    int64_t begin, end, step;
};

constexpr int64_t PIXELS = 64; // pixels that are moved through all frames before the next ones

// Move a group of the channels of n pixels through the frames. `x` and `end` are at the first pixel's channel.
template <class T, bool RESTORE>
void shift_pixels(T* x, T* end, int64_t pitch, int64_t n, const Group& g, const Clips& s) {
    const int64_t frame = s.pixels * s.channels, bytes = (g.end - g.begin) * int64_t(sizeof(T));
    const auto each = [&](auto copy) {
        for (int64_t p = 0; p < n; p++) copy(p * s.channels, p * pitch);
    };
    T *at = x + (g.step > 0 ? 0 : s.frames - 1) * frame, *const opened = x + (g.step > 0 ? s.frames - 1 : 0) * frame;
    if (end && !RESTORE) each([&](int64_t row, int64_t kept) { std::memcpy(end + kept, at + row, bytes); });
    for (; at != opened; at += g.step * frame)
        each([&](int64_t row, int64_t) { std::memcpy(at + row, at + g.step * frame + row, bytes); });
    if (end && RESTORE)
        each([&](int64_t row, int64_t kept) { std::memcpy(at + row, end + kept, bytes); });
    else
        each([&](int64_t row, int64_t) { std::memset(at + row, 0, bytes); });
}

// Shift groups of channels, in place. What drops out of a clip goes to `ends` (clips * pixels rows, the groups side by
// side), and what opens becomes zero. With RESTORE what opens comes from `ends` instead. Without `ends` what drops out
// is lost.
template <class T, bool RESTORE>
void shift(T* x, T* ends, const Group* groups, int64_t num_groups, const Clips& s) {
    int64_t pitch = 0;
    for (int64_t i = 0; i < num_groups; i++) pitch += groups[i].end - groups[i].begin;
    const int64_t blocks = (s.pixels + PIXELS - 1) / PIXELS, count = s.clips * blocks;
    const int64_t workers = count * PIXELS * s.frames * pitch < SMALL ? 1 : std::clamp<int64_t>(s.threads, 1, count);
    in_parallel(workers, count, [&](int64_t, int64_t first, int64_t last) {
        for (int64_t b = first; b < last; b++) {
            const int64_t clip = b / blocks, pixel = b % blocks * PIXELS, n = std::min(PIXELS, s.pixels - pixel);
            T* const at = x + (clip * s.frames * s.pixels + pixel) * s.channels;
            T* end = ends ? ends + (clip * s.pixels + pixel) * pitch : nullptr;
            for (int64_t i = 0; i < num_groups; i++) {
                const Group& g = groups[i];
                shift_pixels<T, RESTORE>(at + g.begin, end, pitch, n, g, s);
                if (end) end += g.end - g.begin;
            }
        }
    });
}

} // namespace

// ------------------------------------------------------------------------------------------ called by Python

#define KERNELS(NAME, T)                                                                                               \
    extern "C" void NAME##_forward(const Forward<T>* t, const Shape* shape, int train, int relu, double momentum,      \
                                   double eps) {                                                                       \
        forward(*t, *shape, train, relu, momentum, eps);                                                               \
    }                                                                                                                  \
    extern "C" void NAME##_backward(const Backward<T>* t, const Shape* shape, int train, int relu) {                   \
        (t->shortcut_grad ? backward<T, Mask::by_result>                                                               \
         : relu           ? backward<T, Mask::by_x>                                                                    \
                          : backward<T, Mask::none>)(*t, *shape, train);                                               \
    }                                                                                                                  \
    extern "C" void NAME##_shift(T* const tensors[2], const Clips* clips, const Group* groups, int64_t num_groups,     \
                                 int restore) {                                                                        \
        (restore ? shift<T, true> : shift<T, false>)(tensors[0], tensors[1], groups, num_groups, *clips);              \
    }

KERNELS(float32, float)
KERNELS(float64, double)
KERNELS(bfloat16, bf16)
