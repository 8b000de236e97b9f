package evernear;

import io.netty.buffer.ByteBuf;
import io.netty.buffer.Unpooled;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.socket.ChannelInputShutdownEvent;
import io.netty.handler.codec.TooLongFrameException;
import io.netty.handler.codec.http.DefaultHttpHeaders;
import io.netty.handler.codec.http.DefaultHttpRequest;
import io.netty.handler.codec.http.HttpHeaders;
import io.netty.handler.codec.http.HttpMessage;
import io.netty.handler.codec.http.HttpMethod;
import io.netty.handler.codec.http.HttpRequestDecoder;
import io.netty.handler.codec.http.HttpVersion;
import java.util.BitSet;
import java.util.List;

/**
 * Decodes one request at a time. After {@link #pause}, further bytes are not decoded until {@link #next}.
 *
 * <p>Netty's FlowControlHandler would queue decoded messages without a limit, so a pipelining client could fill the
 * heap.
 */
final class Requests extends HttpRequestDecoder {
    // Only a client that has closed its side (EPOLLRDHUP) can deliver more than a receive buffer.
    private static final int MAX_AHEAD_BYTES = 128 * 1024;

    // RFC 9110, section 5.6.2. This is not a regular expression, because it is applied to every header.
    private static final BitSet TOKEN_CHARACTERS = new BitSet();

    static {
        "!#$%&'*+-.^_`|~0123456789".chars().forEach(TOKEN_CHARACTERS::set);
        TOKEN_CHARACTERS.set('A', 'Z' + 1);
        TOKEN_CHARACTERS.set('a', 'z' + 1);
    }

    private enum Mode {
        DECODE,
        PAUSE,
        DISCARD
    }

    private Mode mode = Mode.DECODE;
    private boolean reading;
    private boolean inputEnded;
    private ChannelHandlerContext context;

    @Override
    public void handlerAdded(ChannelHandlerContext context) {
        this.context = context;
    }

    /** Stops decoding. */
    void pause() {
        mode = Mode.PAUSE;
    }

    /** Resumes with the next request. */
    void next() throws Exception {
        resume(Mode.DECODE);
    }

    /** Reads and discards all bytes until the end of the connection. */
    void discard() throws Exception {
        resume(Mode.DISCARD);
    }

    private void resume(Mode next) throws Exception {
        mode = next;
        if (reading) {
            return; // channelRead continues by itself
        }
        if (actualReadableBytes() > 0) {
            channelRead(context, Unpooled.EMPTY_BUFFER); // decodes the bytes received so far
        }
        if (mode == Mode.PAUSE) {
            return;
        }
        context.channel().config().setAutoRead(true);
        if (inputEnded) {
            inputEnded = false;
            super.userEventTriggered(context, ChannelInputShutdownEvent.INSTANCE);
        }
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object bytes) throws Exception {
        reading = true;
        try {
            super.channelRead(context, bytes);
        } finally {
            reading = false;
        }
        if (mode == Mode.PAUSE && actualReadableBytes() > 0) {
            context.channel().config().setAutoRead(false);
            if (actualReadableBytes() > MAX_AHEAD_BYTES) {
                context.close();
            }
        }
    }

    @Override
    protected void decode(ChannelHandlerContext context, ByteBuf bytes, List<Object> messages) throws Exception {
        if (mode == Mode.DECODE) {
            super.decode(context, bytes, messages);
        } else if (mode == Mode.DISCARD) {
            bytes.skipBytes(bytes.readableBytes());
        }
    }

    /** Netty's method reads more bytes if no message was decoded, which would be wrong while paused. */
    @Override
    public void channelReadComplete(ChannelHandlerContext context) throws Exception {
        if (mode == Mode.PAUSE) {
            context.fireChannelReadComplete();
        } else {
            super.channelReadComplete(context);
        }
    }

    /** Delays the end of the client's side until all its requests are decoded. */
    @Override
    public void userEventTriggered(ChannelHandlerContext context, Object event) throws Exception {
        if (event == ChannelInputShutdownEvent.INSTANCE && mode == Mode.PAUSE) {
            inputEnded = true;
        } else {
            super.userEventTriggered(context, event);
        }
    }

    @Override
    protected HttpMessage createMessage(String[] initialLine) {
        requireToken(initialLine[0], "method");
        return new DefaultHttpRequest(
                HttpVersion.valueOf(initialLine[2]), HttpMethod.valueOf(initialLine[0]), initialLine[1], new Headers());
    }

    /** Netty's method chooses one of the two lengths, and a proxy may choose the other length. */
    @Override
    protected void handleTransferEncodingChunkedWithContentLength(HttpMessage request) {
        throw new IllegalArgumentException("it has both Content-Length and Transfer-Encoding");
    }

    /** Netty accepts control characters in some places. */
    private static void requireToken(CharSequence word, String description) {
        boolean isToken = word.length() > 0;
        for (int at = 0; at < word.length(); at++) {
            isToken &= TOKEN_CHARACTERS.get(word.charAt(at));
        }
        if (!isToken) {
            throw new IllegalArgumentException("the " + description + " is not a token");
        }
    }

    /** Netty limits the size of headers, but not the number of headers. */
    private static final class Headers extends DefaultHttpHeaders {
        private static final int MAX_HEADERS = 100;

        private int count;

        @Override
        public HttpHeaders add(CharSequence name, Object value) {
            if (++count > MAX_HEADERS) {
                throw new TooLongFrameException("more than " + MAX_HEADERS + " headers");
            }
            requireToken(name, "name of a header");
            return super.add(name, value);
        }
    }
}
