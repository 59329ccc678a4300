#include <dlfcn.h>

#include <condition_variable>
#include <mutex>
#include <sstream>
#include <string>

// torch's wheels run where glibc is 2.28 and the C++ library is GCC 8's or
// newer. What is compiled on a newer system asks for newer versions of a few
// symbols. This file defines these, for the library that it is linked into
// alone, and asks for no newer ones itself.

#if defined(__GLIBC__) && defined(__GLIBCXX__)

// GCC's headers have the code of these functions too, which newer libraries
// export: the constructors since GCC 9, str() in this form since GCC 11.
template std::stringstream::basic_stringstream();
template std::ostringstream::basic_ostringstream();
template std::string std::stringbuf::str() const&;
template std::string std::stringbuf::str() &&;

#if _GLIBCXX_RELEASE >= 12
// GCC 12 took away its noexcept, and gave it a new version.
void std::condition_variable::wait(std::unique_lock<std::mutex>& lock) {
  pthread_cond_wait(native_handle(), lock.mutex()->native_handle());
}
#endif

extern "C" {

// glibc 2.32 and newer tell the C++ library by this whether a counter may do
// without atomic operations. 0 says that it may not.
char __libc_single_threaded = 0;

// glibc 2.34 moved dlsym to libc, which gave it a new version. A linker binds
// any_dlsym to the version that each glibc has.
#if defined(__aarch64__)
__asm__(".symver any_dlsym, dlsym@GLIBC_2.17");
#else
__asm__(".symver any_dlsym, dlsym@GLIBC_2.2.5");
#endif
void* any_dlsym(void* handle, const char* name) noexcept;
void* dlsym(void* handle, const char* name) noexcept {
  return any_dlsym(handle, name);
}
}

#endif
