// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/api/plugins.hpp"

#include <dlfcn.h>

#include <string>
#include <utility>

namespace m2n {
namespace {

/// An open shared library. Closes it unless keep() was called.
class Library {
 public:
  explicit Library(std::string path)
      : path_(std::move(path)), handle_(dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) {
      throw Error(Errc::usage, std::string("cannot load plug-in ") + dlerror());
    }
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library() {
    if (handle_ != nullptr) {
      (void)dlclose(handle_);  // nothing useful to do with a failure here
    }
  }

  void* symbol(const char* name) const {
    void* const address = dlsym(handle_, name);
    if (address == nullptr) {
      throw Error(Errc::usage,
                  "plug-in " + path_ + " does not export " + name +
                      "; a plug-in is defined with M2N_PLUGIN of core/api/plugins.hpp");
    }
    return address;
  }
  void keep() noexcept { handle_ = nullptr; }

 private:
  std::string path_;
  void* handle_ = nullptr;
};

}  // namespace

void load_plugin(const std::filesystem::path& file, Registries& registries) {
  // Absolute, since a bare name would be looked for in the system's library folders.
  const std::string path = std::filesystem::absolute(file).string();
  Library library(path);

  const auto version =
      *static_cast<const std::uint32_t*>(library.symbol("m2n_plugin_interface_version"));
  if (version != kInterfaceVersion) {
    throw Error(Errc::usage, "plug-in " + path + " was built for interface version " +
                                 std::to_string(version) + " and this m2n has version " +
                                 std::to_string(kInterfaceVersion) +
                                 "; build it again with the headers of this m2n");
  }

  using Register = void (*)(Registries&);
  const auto add_to = reinterpret_cast<Register>(library.symbol("m2n_plugin_register"));
  library.keep();  // from here on its code may be in use
  Registries extended = registries;
  try {
    add_to(extended);
  } catch (const Error& error) {
    throw Error(error.code(), "plug-in " + path + " cannot be added: " + error.what());
  } catch (const std::exception& error) {
    throw Error(Errc::usage, "plug-in " + path + " cannot be added: " + error.what());
  }
  registries = std::move(extended);
}

}  // namespace m2n
