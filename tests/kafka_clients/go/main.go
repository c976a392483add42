// A client of franz-go that reads, follows or writes one topic on command; see ../README.md.
package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	recordBytes = 100
	aheadMax    = 2000
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	if len(arguments) < 4 {
		return fmt.Errorf("%q: expected a command, addresses, a topic and what it needs", arguments)
	}
	addresses, topic, rest := strings.Split(arguments[1], ","), arguments[2], arguments[3:]
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { // the end of the standard input is the end of the work
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	common := []kgo.Opt{
		kgo.SeedBrokers(addresses...),
		kgo.MetadataMinAge(100 * time.Millisecond),
		kgo.RetryBackoffFn(func(int) time.Duration { return 100 * time.Millisecond }),
	}
	switch arguments[0] {
	case "read":
		offset, err := strconv.ParseInt(rest[0], 10, 64)
		if err != nil {
			return err
		}
		where := map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().At(offset)}}
		return read(ctx, -1, append(common, kgo.ConsumePartitions(where),
			kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	case "subscribe":
		count, err := strconv.Atoi(rest[1])
		if err != nil {
			return err
		}
		return read(ctx, count, append(common, kgo.ConsumerGroup(rest[0]), kgo.ConsumeTopics(topic),
			kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.DisableAutoCommit())...)
	case "write":
		return write(ctx, topic, append(common, kgo.ProducerLinger(2*time.Millisecond),
			kgo.ProducerBatchMaxBytes(4096), kgo.ProducerBatchCompression(codecs[rest[0]]),
			kgo.MaxBufferedRecords(aheadMax))...)
	}
	return fmt.Errorf("%q: expected read, subscribe or write", arguments[0])
}

var codecs = map[string]kgo.CompressionCodec{
	"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
	"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
}

// read writes frames to the standard output; a member of a group commits after `count` records.
func read(ctx context.Context, count int, options ...kgo.Opt) error {
	client, err := kgo.NewClient(options...)
	if err != nil {
		return err
	}
	defer client.Close()
	out := bufio.NewWriterSize(os.Stdout, 1<<20)
	for found := 0; count < 0 || found < count; {
		most := 10_000
		if count >= 0 {
			most = min(most, count-found)
		}
		fetches := client.PollRecords(ctx, most)
		if ctx.Err() != nil {
			return out.Flush()
		}
		fetches.EachError(func(topic string, partition int32, err error) {
			fmt.Fprintln(os.Stderr, "passing:", err)
		})
		fetches.EachRecord(func(record *kgo.Record) {
			var head [12]byte
			binary.BigEndian.PutUint64(head[:8], uint64(record.Offset))
			binary.BigEndian.PutUint32(head[8:], uint32(len(record.Value)))
			_, _ = out.Write(head[:])
			_, _ = out.Write(record.Value)
			found++
		})
		if err := out.Flush(); err != nil {
			return err
		}
	}
	return client.CommitUncommittedOffsets(ctx)
}

// write sends numbered records until the standard input ends, and tells of each what became of it.
func write(ctx context.Context, topic string, options ...kgo.Opt) error {
	client, err := kgo.NewClient(options...)
	if err != nil {
		return err
	}
	defer client.Close()
	var mutex sync.Mutex
	out := bufio.NewWriter(os.Stdout)
	report := func(format string, values ...any) {
		mutex.Lock()
		defer mutex.Unlock()
		fmt.Fprintf(out, format, values...)
		_ = out.Flush()
	}
	number := 0
	for ; ctx.Err() == nil; number++ {
		mine, value := number, fmt.Sprintf("%d:", number)
		value += strings.Repeat("x", recordBytes-len(value))
		record := &kgo.Record{Topic: topic, Value: []byte(value)}
		// It waits while aheadMax records are not acknowledged.
		client.Produce(context.Background(), record, func(record *kgo.Record, err error) {
			if err != nil {
				report("error %d %v\n", mine, err)
			} else {
				report("written %d %d\n", mine, record.Offset)
			}
		})
	}
	if err := client.Flush(context.Background()); err != nil {
		return err
	}
	report("sent %d\n", number)
	return nil
}
