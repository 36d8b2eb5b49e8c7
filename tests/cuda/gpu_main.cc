// decode_test.cc on hardware.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

int main(int argc, char **argv)
{
    testing::InitGoogleTest(&argc, argv);
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        printf("skipped: no CUDA device, so the kernels ran in the emulator only\n");
        return 77;
    }
    return RUN_ALL_TESTS();
}
