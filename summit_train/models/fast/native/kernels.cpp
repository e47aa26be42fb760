// The functions that Python calls (kernels.py), one set for each number format of the activations.
#include "normalise.hpp"
#include "shift.hpp"

#define KERNELS(NAME, T)                                                                                               \
    extern "C" void NAME##_forward(const T* x, const T* shortcut, T* result, const A<T>* weight, const A<T>* bias,      \
                                   A<T>* running_mean, A<T>* running_variance, A<T>* mean, A<T>* inverse,              \
                                   const Shape* shape, int train, int relu, double momentum, double eps) {             \
        forward<T>(x, shortcut, result, weight, bias, running_mean, running_variance, mean, inverse, *shape, train,    \
                   relu, momentum, eps);                                                                               \
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
    extern "C" void NAME##_shift(T* x, T* ends, const Clips* clips, const Group* groups, int64_t num_groups,           \
                                 int restore) {                                                                        \
        (restore ? shift<T, true> : shift<T, false>)(x, ends, groups, num_groups, *clips);                             \
    }

KERNELS(float32, float)
KERNELS(float64, double)
KERNELS(bfloat16, bf16)
