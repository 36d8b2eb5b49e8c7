#include "connector/sentence.h"

#include <stdarg.h>
#include <stdio.h>

cg_status cg_sentence_say(const cg_sentence *error, cg_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (error->text != NULL && error->bytes > 0)
        vsnprintf(error->text, error->bytes, format, arguments);
    va_end(arguments);
    return status;
}
