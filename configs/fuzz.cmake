# cmake -C configs/fuzz.cmake -B build-fuzz -G Ninja && ninja -C build-fuzz fuzz_targets
# libFuzzer with AddressSanitizer and UndefinedBehaviorSanitizer; needs clang and its compiler-rt.
set(CMAKE_C_COMPILER clang CACHE STRING "")
set(CMAKE_CXX_COMPILER clang++ CACHE STRING "")
set(CMAKE_BUILD_TYPE Debug CACHE STRING "")
set(flags "-O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all")
set(flags "${flags} -fsanitize=fuzzer-no-link,address,undefined")
set(CMAKE_C_FLAGS_DEBUG "${flags}" CACHE STRING "")
set(CMAKE_CXX_FLAGS_DEBUG "${flags}" CACHE STRING "")
set(CG_FUZZ ON CACHE BOOL "")
set(CG_CUDA OFF CACHE BOOL "")
