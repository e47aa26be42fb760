// Batch normalisation, the sum with a shortcut, and relu in as few passes over memory as there can be, on CPUs.
//
// Forward, the convolution's result x is read twice (moments, then the result) and the result is written once. Backward,
// the gradient and x are read twice.
//
// Sources: Ioffe and Szegedy, "Batch Normalization" (2015), Algorithm 1 and section 3; the moments of blocks are merged
// as in Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm" (1979), equations 2.1.
#pragma once
#include <cmath>
#include <vector>

#include "rows.hpp"

namespace {

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
        // Differences from the first row: a mean that is large beside the deviations costs no digits.
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

    Affine(const A<T>* weight, const A<T>* bias, const A<T>* mean, const A<T>* inverse, int64_t C) : scale(C), shift(C) {
        for (int64_t c = 0; c < C; c++) {
            scale[c] = weight[c] * inverse[c];
            shift[c] = bias[c] - mean[c] * scale[c];
        }
    }
};

template <class N> inline N rectified(N x) { return x < 0 ? N(0) : x; } // keeps a NaN

template <class T, bool SHORTCUT, bool RELU>
void apply(const T* x, const T* shortcut, T* result, const Affine<T>& affine, const Shape& s) {
    const int64_t C = s.channels;
    const bool stream = s.is_large<T>();
    const A<T>*const scale = affine.scale.data(), *const shift = affine.shift.data();
    in_parallel(s.workers(), s.rows, [&](int64_t, int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            const T *const from = x + r * C, *const other = SHORTCUT ? shortcut + r * C : nullptr;
            prefetch(from, C);
            if constexpr (SHORTCUT) prefetch(other, C);
            write(result + r * C, C, stream, [=](int64_t c) {
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
void forward(const T* x, const T* shortcut, T* result, const A<T>* weight, const A<T>* bias, A<T>* running_mean,
             A<T>* running_variance, A<T>* mean, A<T>* inverse, const Shape& s, bool train, bool relu, double momentum,
             double eps) {
    const int64_t C = s.channels;
    if (train) {
        moments(x, s, mean, inverse);
        if (running_mean) {
            run(running_mean, mean, C, momentum, 1);
            run(running_variance, inverse, C, momentum, double(s.rows) / double(s.rows - 1));
        }
    } else {
        std::copy(running_mean, running_mean + C, mean);
        std::copy(running_variance, running_variance + C, inverse);
    }
    for (int64_t c = 0; c < C; c++) inverse[c] = A<T>(1 / std::sqrt(double(inverse[c]) + eps));
    const Affine<T> affine(weight, bias, mean, inverse, C);
    const auto each = shortcut ? apply<T, true, true> : relu ? apply<T, false, true> : apply<T, false, false>;
    each(x, shortcut, result, affine, s);
}

// ------------------------------------------------------------------------------------------------------ backward

// Where relu passes a gradient: where its result is above 0. x tells that too, unless a shortcut was added.
enum class Mask { none, by_x, by_result };

template <class N> inline N masked(N grad, N y) { return y <= 0 ? N(0) : grad; } // past a NaN, as torch does

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
template <class T, Mask MASK>
Sums<T> reduce(const T* grad, const T* result, const T* x, T* shortcut_grad, const A<T>* mean, const Affine<T>& affine,
               const Shape& s) {
    const int64_t C = s.channels, block = std::max<int64_t>(32, BLOCK_BYTES / int64_t(C * sizeof(T)));
    const bool stream = s.is_large<T>();
    const A<T>*const scale = affine.scale.data(), *const shift = affine.shift.data();
    std::vector<Sums<T>> parts(s.workers(), Sums<T>(C));
    in_parallel(s.workers(), s.rows, [&](int64_t w, int64_t first, int64_t last) {
        A<T>*const sum = parts[w].block_grad.data(), *const product = parts[w].block_product.data();
        for (int64_t r = first; r < last; r++) {
            const T *const from = x + r * C, *const dy = grad + r * C;
            const auto summed = [=](int64_t c, A<T> d) {
                sum[c] += d;
                product[c] += d * (load(from[c]) - mean[c]);
                return d;
            };
            prefetch(from, C);
            prefetch(dy, C);
            if constexpr (MASK == Mask::by_result) {
                const T* const y = result + r * C;
                prefetch(y, C);
                write(shortcut_grad + r * C, C, stream,
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

// Second pass: the gradient to x. `grad` is masked already where MASK is not by_x.
template <class T, Mask MASK>
void spread(const T* grad, const T* x, T* x_grad, const A<T>* mean, const Affine<T>& affine,
            const std::vector<A<T>>& slopes, const std::vector<A<T>>& levels, const Shape& s) {
    const int64_t C = s.channels;
    const bool stream = s.is_large<T>();
    const A<T>*const scale = affine.scale.data(), *const shift = affine.shift.data(), *const slope = slopes.data(),
               *const level = levels.data();
    in_parallel(s.workers(), s.rows, [&](int64_t, int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            const T *const from = x + r * C, *const dy = grad + r * C;
            prefetch(from, C);
            prefetch(dy, C);
            write(x_grad + r * C, C, stream, [=](int64_t c) {
                const A<T> here = load(from[c]);
                A<T> d = load(dy[c]);
                if constexpr (MASK == Mask::by_x) d = masked(d, here * scale[c] + shift[c]);
                return scale[c] * d + (slope[c] * (here - mean[c]) + level[c]);
            });
        }
        written(stream);
    });
}

template <class T, Mask MASK>
void backward(const T* grad, const T* result, const T* x, T* shortcut_grad, T* x_grad, const A<T>* weight,
              const A<T>* bias, const A<T>* mean, const A<T>* inverse, A<T>* weight_grad, A<T>* bias_grad,
              const Shape& s, bool train) {
    const int64_t C = s.channels;
    const Affine<T> affine(weight, bias, mean, inverse, C);
    const Sums<T> sums = reduce<T, MASK>(grad, result, x, shortcut_grad, mean, affine, s);
    std::vector<A<T>> slopes(C, 0), levels(C, 0);
    for (int64_t c = 0; c < C; c++) {
        weight_grad[c] = A<T>(sums.product[c] * inverse[c]);
        bias_grad[c] = A<T>(sums.grad[c]);
        if (train) { // otherwise mean and variance are constants
            const double each = double(affine.scale[c]) / double(s.rows);
            slopes[c] = A<T>(-each * sums.product[c] * inverse[c] * inverse[c]);
            levels[c] = A<T>(-each * sums.grad[c]);
        }
    }
    if (x_grad)
        spread<T, MASK>(MASK == Mask::by_result ? shortcut_grad : grad, x, x_grad, mean, affine, slopes, levels, s);
}

} // namespace
