/* Bytes in stdin and stdout. */
#ifndef STREAMS_H
#define STREAMS_H

#ifdef _WIN32
#include <fcntl.h>
#include <io.h>
#endif

/* Windows would write two bytes for each one of a line's end. */
static void have_bytes_in_streams(void) {
#ifdef _WIN32
    _setmode(0, _O_BINARY);
    _setmode(1, _O_BINARY);
#endif
}

#endif
