// What Python calls (kernels.py), by the type that activations are stored in.
#include "moves.hpp"
#include "normalise.hpp"

#define NORMALISE(NAME, T)                                                                                             \
    extern "C" void NAME##_forward(const T* x, const T* shortcut, T* result, const A<T>* weight, const A<T>* bias,      \
                                   A<T>* running_mean, A<T>* running_variance, A<T>* mean, A<T>* inverse,              \
                                   const Shape* shape, int train, int relu, double momentum, double eps) {             \
        forward(x, shortcut, result, weight, bias, running_mean, running_variance, mean, inverse, *shape, train, relu, \
                momentum, eps);                                                                                        \
    }                                                                                                                  \
    extern "C" void NAME##_backward(const T* grad, const T* result, const T* x, T* shortcut_grad, T* x_grad,           \
                                    const A<T>* weight, const A<T>* bias, const A<T>* mean, const A<T>* inverse,       \
                                    A<T>* weight_grad, A<T>* bias_grad, const Shape* shape, int train, int relu) {     \
        const auto each = shortcut_grad ? backward<T, Mask::by_result>                                                 \
                          : relu        ? backward<T, Mask::by_x>                                                      \
                                        : backward<T, Mask::none>;                                                     \
        each(grad, result, x, shortcut_grad, x_grad, weight, bias, mean, inverse, weight_grad, bias_grad, *shape,      \
             train);                                                                                                   \
    }                                                                                                                  \
    extern "C" void NAME##_move(const T* x, T* to, const Shape* shape, int64_t height, int64_t width, int64_t stride,  \
                                int blank) {                                                                           \
        move(x, to, *shape, height, width, stride, blank);                                                             \
    }                                                                                                                  \
    extern "C" int NAME##_swap_ends(T* x, const Shape* shape, int back) {                                               \
        return swap_ends(x, *shape, back);                                                                             \
    }

NORMALISE(float32, float)
NORMALISE(float64, double)
NORMALISE(bfloat16, bf16)
