# Space for what will be appended to a file, see `dmq.storage.files`.

cdef extern from *:
    """
    #include <errno.h>
    #include <fcntl.h>

    static int dmq_reserve(int descriptor, long long at, long long size) {
    #ifdef FALLOC_FL_KEEP_SIZE
        int result;
        do result = fallocate(descriptor, FALLOC_FL_KEEP_SIZE, at, size);
        while (result < 0 && errno == EINTR);
        return result == 0;
    #else
        return 0;
    #endif
    }
    """
    bint dmq_reserve(int descriptor, long long at, long long size) noexcept


def reserve(int descriptor, long long at, long long size):
    """Take space on the disk for a range of a file, whose size stays as it is; whether it was taken."""
    return dmq_reserve(descriptor, at, size)
