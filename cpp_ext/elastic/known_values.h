// What dicts of Python hold, for those who look into them in every step.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace baguarun::elastic {

// Whether dicts still hold the objects that they held: for settings, which seldom change. An object that
// changes in its place (a tensor, a list) is still the same.
//
// Threads: those that hold the interpreter's lock.
class KnownValues {
 public:
  // Whether these are the dicts of the last call, with the same keys and values. Remembers them.
  bool are(const std::vector<pybind11::dict>& dicts);
  // The next call finds others.
  void forget() { known_.clear(); }

 private:
  // The dicts, their keys and their values, so that no other object can have one's address.
  std::vector<pybind11::object> known_;
};

// The values of all `dicts` that are not None, in their order.
pybind11::list valuesIn(const std::vector<pybind11::dict>& dicts);

}  // namespace baguarun::elastic
