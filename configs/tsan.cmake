# cmake -C configs/tsan.cmake -B build-tsan -G Ninja
# ThreadSanitizer. "unexpected memory mapping" at the start of a program: run it under `setarch -R`.
set(CMAKE_BUILD_TYPE Debug CACHE STRING "")
set(flags "-O1 -g1 -fno-omit-frame-pointer -fsanitize=thread")
set(CMAKE_C_FLAGS_DEBUG "${flags}" CACHE STRING "")
set(CMAKE_CXX_FLAGS_DEBUG "${flags}" CACHE STRING "")
set(CG_CUDA OFF CACHE BOOL "")
# Kernels, and what lays out bases for them, hold no state. Watched, each of their loads and stores is
# a call, and tests take three times as long. So a race for a buffer that a kernel works on shows only
# where the kernel's caller touches it, too.
set(CG_KERNEL_FLAGS "-fno-sanitize=thread" CACHE STRING "")
