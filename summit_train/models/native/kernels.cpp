// What Python calls (kernels.py), by the type that activations are stored in.
#include "moves.hpp"
#include "normalise.hpp"

#define KERNELS(NAME, T)                                                                                               \
    extern "C" void NAME##_forward(const T* x, const T* shortcut, const T* ends, T* result, T* result_ends,             \
                                   const A<T>* weight, const A<T>* bias, A<T>* running_mean, A<T>* running_variance,   \
                                   A<T>* mean, A<T>* inverse, const Shape* shape, int train, int relu,                 \
                                   double momentum, double eps) {                                                      \
        forward<T>(x, {shortcut, ends}, {result, result_ends}, weight, bias, running_mean, running_variance, mean,     \
                   inverse, *shape, train, relu, momentum, eps);                                                       \
    }                                                                                                                  \
    extern "C" void NAME##_backward(const T* grad, const T* beside, const T* ends, const T* result, const T* x,        \
                                    T* shortcut_grad, T* shortcut_ends, T* x_grad, const A<T>* weight,                 \
                                    const A<T>* bias, const A<T>* mean, const A<T>* inverse, A<T>* weight_grad,        \
                                    A<T>* bias_grad, const Shape* shape, int train, int relu) {                        \
        const auto each = shortcut_grad ? backward<T, Mask::by_result>                                                 \
                          : relu        ? backward<T, Mask::by_x>                                                      \
                                        : backward<T, Mask::none>;                                                     \
        each({{grad, ends}, beside}, result, x, {shortcut_grad, shortcut_ends}, x_grad, weight, bias, mean, inverse,   \
             weight_grad, bias_grad, *shape, train);                                                                   \
    }                                                                                                                  \
    extern "C" void NAME##_move(const T* x, const T* ends, T* to, T* to_ends, const Shape* shape, int64_t height,      \
                                int64_t width, int64_t stride) {                                                       \
        move<T>({x, ends}, {to, to_ends}, *shape, height, width, stride);                                              \
    }

KERNELS(float32, float)
KERNELS(float64, double)
KERNELS(bfloat16, bf16)
