// Makes an autograd node whose saved tensors and backward the test defines.
//
//   at::Tensor y = Probe(carrier, {t.transpose(0, 1)}, [&](const at::Tensor& grad,
//                                                           const UnpackSaved& unpack) {
//     seen = unpack();        // the saved tensors, as a node of autograd would get them
//     return grad;            // the gradient of `carrier`
//   });
//   y.backward();

#ifndef PINION_TESTS_HOOKS_SUPPORT_PROBE_H_
#define PINION_TESTS_HOOKS_SUPPORT_PROBE_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace pinion::testing {

using UnpackSaved = std::function<std::vector<at::Tensor>()>;
using ProbeBackward = std::function<at::Tensor(const at::Tensor& grad, const UnpackSaved& unpack)>;

// Returns a copy of `carrier`, which requires a gradient, made by a node that saves `saved`. With
// `compute`, returns its result instead; it runs below autograd, like an operator's kernel.
at::Tensor Probe(const at::Tensor& carrier, const std::vector<at::Tensor>& saved,
                 ProbeBackward backward, const std::function<at::Tensor()>& compute = nullptr);

// Returns a Probe that keeps what it unpacks: (*seen)[i] is saved[i] after backward.
at::Tensor Observe(const at::Tensor& carrier, const std::vector<at::Tensor>& saved,
                   std::vector<at::Tensor>* seen);

// Returns a float tensor with a history, like an activation, on the carrier's device. Its values
// are first, first + 1, ... modulo 251.
at::Tensor Activation(const at::Tensor& carrier, at::IntArrayRef sizes, int first = 0);

// Returns the values of Activation(..., sizes, first) on the CPU.
at::Tensor ActivationValues(at::IntArrayRef sizes, int first = 0);

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_SUPPORT_PROBE_H_
