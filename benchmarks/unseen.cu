// unseen: what initcheck does not see. 256 floats are stored, by threads or by Hopper's engine from shared memory, and read again.
//
// unseen threads    right, and initcheck reports nothing
// unseen engine     right as well, and initcheck reports reads of memory that nobody has written
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>

__global__ void by_threads(float* out) { out[blockIdx.x * 32 + threadIdx.x] = threadIdx.x; }

__global__ void by_engine(float* out) {
    __shared__ alignas(128) float tile[32];
    tile[threadIdx.x] = threadIdx.x;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x != 0) return;
    unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(tile));
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;" ::"l"(out + blockIdx.x * 32), "r"(from) : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
}

__global__ void add_one(const float* in, float* out) { out[blockIdx.x * 32 + threadIdx.x] = in[blockIdx.x * 32 + threadIdx.x] + 1; }

int main(int count, char** words) {
    float *stored, *read, seen[256];
    cudaMalloc(&stored, sizeof(seen));
    cudaMalloc(&read, sizeof(seen));
    if (count > 1 && !strcmp(words[1], "engine"))
        by_engine<<<8, 32>>>(stored);
    else
        by_threads<<<8, 32>>>(stored);
    add_one<<<8, 32>>>(stored, read);
    cudaError_t state = cudaMemcpy(seen, read, sizeof(seen), cudaMemcpyDeviceToHost);
    int right = 0;
    for (int i = 0; i < 256; ++i) right += seen[i] == i % 32 + 1;
    printf("%d of 256 right, %s\n", right, cudaGetErrorString(state));
}
