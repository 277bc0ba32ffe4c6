// row_index: reads a matrix whose rows are rows of another array, in some order, without a copy of them.
//
// INDEXED        whether row i of the matrix is row index[i] of the array, which has that row
#pragma once

#ifndef INDEXED
#define INDEXED 0
#endif

// The number of the row that is read as `row`; the index has no entry for a row that does not exist.
OPFUSE_FN long long row_read(const long long* index, long long row, bool exists) { return INDEXED && exists ? index[row] : row; }
