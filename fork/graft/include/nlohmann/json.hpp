// Stands in for the library of this name. No wheel of torch has it, but from
// 2.8 on ATen/functorch/Interpreter.h includes it, for two inline functions
// that nothing here calls: so declarations are enough.
#pragma once

#include <string>

namespace nlohmann {

struct json {
  json();
  template <typename T>
  json(const T& value);

  static json parse(const std::string& text);
  std::string dump() const;
  template <typename T>
  T get() const;
};

} // namespace nlohmann
