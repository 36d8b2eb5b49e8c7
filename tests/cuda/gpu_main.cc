// decode_test.cc on hardware.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

int main(int argc, char **argv)
{
    testing::InitGoogleTest(&argc, argv);
    int n_devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&n_devices);
    if (error != cudaSuccess || n_devices == 0) { // also with a driver that is too old
        printf("skipped: no CUDA device (%s), so the kernels ran in the emulator only\n",
               cudaGetErrorString(error));
        return 77;
    }
    return RUN_ALL_TESTS();
}
