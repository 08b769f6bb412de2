// What g++ takes from its own libstdc++ and glibc, defined here, so that the library also loads
// with the libstdc++ of GCC 8 and with glibc 2.28. Headers declare these names for all to see;
// labels of the assembler keep them inside of this library.

#include <new>
#include <sstream>

#ifdef __GLIBCXX__

// Since GCC 9 their constructors without arguments are functions of libstdc++.
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

extern "C" {

// Since GCC 11: what containers call for too many elements.
[[noreturn]] void hcp__throw_bad_array_new_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");

// Since glibc 2.32: whether the process has one thread. It may have several.
extern char hcp__single_threaded __asm__("__libc_single_threaded");
char hcp__single_threaded = 0;
}

void hcp__throw_bad_array_new_length() { throw std::bad_array_new_length(); }

#endif
