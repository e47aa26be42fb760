// Batch normalisation, the sum with a shortcut and relu in as few passes over memory as there can be, on CPUs.
//
// A convolution's result x has its channels last: rows of pixels, `frames` to a clip, `channels` to a row. Forward it
// is read twice (moments, then the result) and the result written once; backward the gradient and x are read twice.
// The shortcut and the result may be stored shifted in time (models/rolled.py): a segment of channels of a frame is then
// in another frame of the clip, or apart. That takes no pass of its own here, as every row is read and written anyway.
//
// Sources: Ioffe and Szegedy, "Batch Normalization" (2015), Algorithm 1 and section 3; the moments of blocks are merged
// as Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm" (1979), equations 2.1.
#pragma once
#include <cmath>
#include <vector>

#include "rows.hpp"

namespace {

// ------------------------------------------------------------------------------------------------------- moments

struct Moments {
    std::vector<double> mean, squares; // of the differences from the mean, summed
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

// sum[c] += f(x, c) over rows, four at a time: else each would wait for the sum of the one before. The rows `ahead` of them
// are asked for, unless they are in the cache (0).
template <class T, class F>
inline void add_rows(const T* x, int64_t C, int64_t first, int64_t last, int64_t ahead, A<T>* sum, F f) {
    int64_t r = first;
    for (; r + 4 <= last; r += 4) {
        const T* const at = x + r * C;
        if (ahead) announce(at, 4 * C, ahead * C);
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
        // From the first row on, so that a mean that is large beside the deviations costs no digits.
        for (int64_t c = 0; c < C; c++) m[c] = load(x[row * C + c]);
        add_rows<T>(x, C, row, end, 2 * rows_ahead<T>(C), s, [m](A<T> value, int64_t c) { return value - m[c]; });
        for (int64_t c = 0; c < C; c++) m[c] = A<T>(wide[c] = double(m[c]) + double(s[c]) / double(end - row));
        std::fill(sum.begin(), sum.end(), A<T>(0));
        add_rows<T>(x, C, row, end, 0, s, [m](A<T> value, int64_t c) { return (value - m[c]) * (value - m[c]); });
        into.merge(wide.data(), s, end - row);
    }
}

// The biased variance of all rows of a channel, and the mean.
template <class T> void moments(const T* x, const Shape& s, A<T>* mean, A<T>* variance) {
    const int64_t threads = threads_for(s);
    std::vector<Moments> parts(threads, Moments(s.channels));
    in_parallel(threads, s.rows(), [&](int64_t t, int64_t first, int64_t last) {
        moments_of_rows(x, s.channels, first, last, parts[t]);
    });
    for (int64_t t = 1; t < threads; t++)
        if (parts[t].count) parts[0].merge(parts[t].mean.data(), parts[t].squares.data(), parts[t].count);
    for (int64_t c = 0; c < s.channels; c++) {
        mean[c] = A<T>(parts[0].mean[c]);
        variance[c] = A<T>(parts[0].squares[c] / double(s.rows()));
    }
}

// ------------------------------------------------------------------------------------------------------- forward

template <class T> struct Affine { // y = x * scale + shift
    std::vector<A<T>> scale, shift;

    Affine(const A<T>* weight, const A<T>* bias, const A<T>* mean, const A<T>* inverse, int64_t C) : scale(C), shift(C) {
        for (int64_t c = 0; c < C; c++) {
            scale[c] = weight[c] * inverse[c];
            shift[c] = bias[c] - mean[c] * scale[c];
        }
    }
};

template <class N> inline N rectified(N x) { return x < 0 ? N(0) : x; } // a NaN stays one

// What is left of a value that fell out of its clip: a zero, whose sign tells whether relu let the value through.
template <class N> inline N trace(N y) { return y <= 0 ? N(-0.0) : N(0); }

template <class T, bool SHORTCUT, bool RELU>
void apply(const T* x, Stream<const T> shortcut, Stream<T> result, const Affine<T>& affine, const Shape& s) {
    const bool stream = is_large<T>(s);
    const Tiles tiles = Tiles::of<T>(s);
    const int64_t ahead = rows_ahead<T>(s.channels);
    const auto each = [&](const Piece& p) {
        const A<T>*const scale = affine.scale.data() + p.begin, *const shift = affine.shift.data() + p.begin;
        const T *const from = x + p.x, *const other = SHORTCUT ? shortcut.at(p.shortcut) : nullptr;
        T* const to = result.at(p.result);
        announce(from, p.width, ahead * s.channels);
        if constexpr (SHORTCUT) announce(other, p.width, ahead * p.shortcut.pitch);
        write(to, p.width, stream && !p.result.outside, [=](int64_t j) {
            A<T> y = load(from[j]) * scale[j] + shift[j];
            if constexpr (SHORTCUT) y += load(other[j]);
            return RELU ? rectified(y) : y;
        });
        if (p.result.outside)
            write(result.frames + p.result.blank, p.width, stream, [=](int64_t j) { return trace(load(to[j])); });
    };
    in_parallel(threads_for(s), tiles.count, [&](int64_t, int64_t first, int64_t last) {
        for (int64_t tile = first; tile < last; tile++) over_pieces<Order::result>(s, tiles, tile, each);
        written(stream);
    });
}

// Running statistics as torch.nn.BatchNorm keeps them: r += momentum * (new - r), the variance unbiased.
template <class N> void run(N* running, const N* found, int64_t C, double momentum, double factor) {
    for (int64_t c = 0; c < C; c++)
        running[c] = N((1 - momentum) * double(running[c]) + momentum * factor * double(found[c]));
}

template <class T>
void forward(const T* x, Stream<const T> shortcut, Stream<T> result, const A<T>* weight, const A<T>* bias,
             A<T>* running_mean, A<T>* running_variance, A<T>* mean, A<T>* inverse, const Shape& s, bool train, bool relu,
             double momentum, double eps) {
    const int64_t C = s.channels, n = s.rows();
    if (train) {
        moments(x, s, mean, inverse);
        if (running_mean) {
            run(running_mean, mean, C, momentum, 1);
            run(running_variance, inverse, C, momentum, double(n) / double(n - 1));
        }
    } else {
        std::copy(running_mean, running_mean + C, mean);
        std::copy(running_variance, running_variance + C, inverse);
    }
    for (int64_t c = 0; c < C; c++) inverse[c] = A<T>(1 / std::sqrt(double(inverse[c]) + eps));
    const Affine<T> affine(weight, bias, mean, inverse, C);
    if (shortcut.frames)
        apply<T, true, true>(x, shortcut, result, affine, s);
    else if (relu)
        apply<T, false, true>(x, shortcut, result, affine, s);
    else
        apply<T, false, false>(x, shortcut, result, affine, s);
}

// ------------------------------------------------------------------------------------------------------ backward

// Where relu passes a gradient: where its result is above 0, which x tells too unless a shortcut was added.
enum class Mask { none, by_x, by_result };

template <class N> inline N masked(N grad, N y) { return y <= 0 ? N(0) : grad; } // past a NaN, as torch has it

template <class T> struct Sums {
    std::vector<double> grad, product; // of grad, and of grad * (x - mean)
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

// The gradients to a result: `beside` is a second one to its frames, or null. None to what it has in place of its ends.
template <class T> struct Gradients {
    Stream<const T> one;
    const T* beside;
};

// The first pass: both sums, and with a shortcut its gradient, stored as the shortcut is.
template <class T, Mask MASK>
Sums<T> reduce(const Gradients<T>& grads, const T* result, const T* x, Stream<T> shortcut_grad, const A<T>* mean,
               const Affine<T>& affine, const Shape& s) {
    const int64_t threads = threads_for(s), C = s.channels;
    const Tiles tiles = Tiles::of<T>(s);
    const int64_t ahead = rows_ahead<T>(C);
    const bool stream = is_large<T>(s);
    std::vector<Sums<T>> parts(threads, Sums<T>(C));
    in_parallel(threads, tiles.count, [&](int64_t t, int64_t first, int64_t last) {
        Sums<T>& sums = parts[t];
        const auto each = [&](const Piece& p) {
            const A<T>*const m = mean + p.begin, *const scale = affine.scale.data() + p.begin,
                 *const shift = affine.shift.data() + p.begin;
            A<T>*const sum = sums.block_grad.data() + p.begin, *const product = sums.block_product.data() + p.begin;
            const T *const from = x + p.x, *const dy = grads.one.at(p.result);
            announce(from, p.width, ahead * C);
            announce(dy, p.width, ahead * p.result.pitch);
            const auto summed = [=](int64_t j, A<T> d) {
                sum[j] += d;
                product[j] += d * (load(from[j]) - m[j]);
                return d;
            };
            if constexpr (MASK != Mask::by_result) {
#pragma omp simd
                for (int64_t j = 0; j < p.width; j++) {
                    const A<T> d = load(dy[j]);
                    summed(j, MASK == Mask::by_x ? masked(d, load(from[j]) * scale[j] + shift[j]) : d);
                }
            } else {
                const T* const y = result + (p.result.outside ? p.result.blank : p.result.at);
                T* const to = shortcut_grad.at(p.shortcut);
                const bool past = stream && !p.shortcut.outside;
                announce(y, p.width, ahead * C);
                if (p.result.outside) {
                    write(to, p.width, past,
                          [=](int64_t j) { return summed(j, masked(load(dy[j]), std::copysign(A<T>(1), load(y[j])))); });
                } else if (grads.beside) {
                    const T* const beside = grads.beside + p.result.at;
                    announce(beside, p.width, ahead * C);
                    write(to, p.width, past,
                          [=](int64_t j) { return summed(j, masked(load(dy[j]) + load(beside[j]), load(y[j]))); });
                } else {
                    write(to, p.width, past, [=](int64_t j) { return summed(j, masked(load(dy[j]), load(y[j]))); });
                }
                if (p.shortcut.outside)
                    write(shortcut_grad.frames + p.shortcut.blank, p.width, stream, [](int64_t) { return A<T>(0); });
            }
        };
        for (int64_t tile = first; tile < last; tile++) {
            over_pieces<Order::shortcut>(s, tiles, tile, each);
            sums.flush();
        }
        written(stream);
    });
    for (int64_t t = 1; t < threads; t++)
        for (int64_t c = 0; c < C; c++) {
            parts[0].grad[c] += parts[t].grad[c];
            parts[0].product[c] += parts[t].product[c];
        }
    return parts[0];
}

// The second pass, over x's frames: its gradient = scale * grad + slope * (x - mean) + level, by channel. With a shortcut
// `grad` is that one's: masked already, and stored as the shortcut is.
template <class T, Mask MASK>
void spread(Stream<const T> grad, const T* x, T* x_grad, const A<T>* mean, const Affine<T>& affine,
            const std::vector<A<T>>& slopes, const std::vector<A<T>>& levels, const Shape& s) {
    const bool stream = is_large<T>(s);
    const Tiles tiles = Tiles::of<T>(s);
    const int64_t ahead = rows_ahead<T>(s.channels);
    const auto each = [&](const Piece& p) {
        const int64_t c = p.begin;
        const A<T>*const m = mean + c, *const scale = affine.scale.data() + c, *const shift = affine.shift.data() + c,
             *const slope = slopes.data() + c, *const level = levels.data() + c;
        const T *const from = x + p.x, *const dy = grad.at(p.shortcut);
        announce(from, p.width, ahead * s.channels);
        announce(dy, p.width, ahead * p.shortcut.pitch);
        write(x_grad + p.x, p.width, stream, [=](int64_t j) {
            const A<T> here = load(from[j]);
            A<T> d = load(dy[j]);
            if constexpr (MASK == Mask::by_x) d = masked(d, here * scale[j] + shift[j]);
            return scale[j] * d + (slope[j] * (here - m[j]) + level[j]);
        });
    };
    in_parallel(threads_for(s), tiles.count, [&](int64_t, int64_t first, int64_t last) {
        for (int64_t tile = first; tile < last; tile++) over_pieces<Order::x>(s, tiles, tile, each);
        written(stream);
    });
}

template <class T, Mask MASK>
void backward(const Gradients<T>& grads, const T* result, const T* x, Stream<T> shortcut_grad, T* x_grad,
              const A<T>* weight, const A<T>* bias, const A<T>* mean, const A<T>* inverse, A<T>* weight_grad,
              A<T>* bias_grad, const Shape& s, bool train) {
    const int64_t C = s.channels;
    const Affine<T> affine(weight, bias, mean, inverse, C);
    const Sums<T> sums = reduce<T, MASK>(grads, result, x, shortcut_grad, mean, affine, s);
    std::vector<A<T>> slopes(C, 0), levels(C, 0);
    for (int64_t c = 0; c < C; c++) {
        weight_grad[c] = A<T>(sums.product[c] * inverse[c]);
        bias_grad[c] = A<T>(sums.grad[c]);
        if (train) { // else mean and variance are constants
            const double each = double(affine.scale[c]) / double(s.rows());
            slopes[c] = A<T>(-each * sums.product[c] * inverse[c] * inverse[c]);
            levels[c] = A<T>(-each * sums.grad[c]);
        }
    }
    if (!x_grad) return;
    const Stream<const T> masked_grad{shortcut_grad.frames, shortcut_grad.ends};
    spread<T, MASK>(MASK == Mask::by_result ? masked_grad : grads.one, x, x_grad, mean, affine, slopes, levels, s);
}

} // namespace
